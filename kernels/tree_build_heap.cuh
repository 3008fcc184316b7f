// Taking prefixes one after the other, by one warp: for large trees that the level-wise way gives up on.
//
// The waiting prefixes are those of the CPU's heap: of every node taken, its best child not yet taken, which waits in
// the slot of its parent. It enters when its parent or its better sibling is taken; its cost, and the costs of the two
// prefixes that will wait once it is taken itself, are computed one step ahead. The best of all slots is found by
// minima over the warp, twice: a lane remembers the best of 32 slots.
#pragma once
#include "tree_build_nodes.cuh"

namespace kdtree {

struct Heap {
  uint16_t next_rank[kMaxNodes];     // of the child that waits in slot p
  Successors successors[kMaxNodes];  // of the prefix that waits in slot p
  double cost[kMaxNodes];            // of the prefix that waits in slot p
};

// Of two waiting prefixes of equal cost.
__device__ __forceinline__ bool waits_before(const Nodes& nodes, const Heap& heap, int slot, int other) {
  return path_less({0.0, slot, nodes.depth[slot] + 1, heap.next_rank[slot]},
                   {0.0, other, nodes.depth[other] + 1, heap.next_rank[other]}, nodes.parent, nodes.rank);
}

// Among lanes whose costs agree in the upper half: the one with the smallest cost, then with the smallest rank path.
__device__ __noinline__ uint32_t settle(const Nodes& nodes, const Heap& heap, bool taking_part, uint32_t low,
                                        int slot) {
  const uint32_t least = __reduce_min_sync(kAllLanes, taking_part ? low : kAllLanes);
  const bool equal = taking_part && low == least;
  int best = equal ? slot : -1;
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const int other = __shfl_xor_sync(kAllLanes, best, offset);
    if (other >= 0 && other != best && (best < 0 || waits_before(nodes, heap, other, best))) best = other;
  }
  return __ballot_sync(kAllLanes, equal && slot == best);
}

// The lane that holds the best of the warp's (cost, slot), or -1 where none can be taken.
__device__ __forceinline__ int best_lane(const Nodes& nodes, const Heap& heap, double cost, int slot) {
  const uint32_t high = high_bits(cost), least = __reduce_min_sync(kAllLanes, high);
  if (least >= kNeverTakenHigh) return -1;
  uint32_t lanes = __ballot_sync(kAllLanes, high == least);
  if (lanes & (lanes - 1)) lanes = settle(nodes, heap, high == least, uint32_t(cost_bits(cost)), slot);
  return __ffs(int(lanes)) - 1;
}

// The lane's group of 32 slots of a large tree: the best of them.
struct Group {
  double cost = kNeverTaken;
  int slot;
};

// Slot `taken` now waits with cost `sibling`, slot `added` with `child`.
__device__ __forceinline__ void update_groups(Group& mine, const Nodes& nodes, Heap& heap, int lane, int taken,
                                              double sibling, int added, double child) {
  const int group = taken / kWarp, at = group * kWarp + lane;
  const double waiting = at == taken ? sibling : at == added ? child : heap.cost[at];
  const int best = best_lane(nodes, heap, waiting, at);
  const double best_cost = __shfl_sync(kAllLanes, waiting, best & 31);
  if (lane == group) mine.cost = best < 0 ? kNeverTaken : best_cost, mine.slot = group * kWarp + (best & 31);
  if (lane == added / kWarp && lane != group &&
      (child < mine.cost ||
       (child == mine.cost && child < kNeverTaken && waits_before(nodes, heap, added, mine.slot))))
    mine.cost = child, mine.slot = added;
  if (lane == 0) heap.cost[taken] = sibling, heap.cost[added] = child;
}

// Takes up to `budget` prefixes; the number of nodes, root included. One warp.
__device__ int grow_by_heap(const Candidates& candidates, Nodes& nodes, Heap& heap, int budget, int lane) {
  for (int i = lane; i < kMaxNodes; i += kWarp) heap.cost[i] = kNeverTaken;
  Group mine{kNeverTaken, lane * kWarp};
  __syncwarp();
  if (lane == 0) {
    mine.cost = heap.cost[0] = __dadd_rn(0.0, candidates.cost(0, 0));
    heap.next_rank[0] = 0;
    heap.successors[0] = {__dadd_rn(0.0, candidates.cost(0, 1)), __dadd_rn(mine.cost, candidates.cost(1, 0))};
  }
  __syncwarp();
  for (int node = 1; node <= budget; ++node) {
    const int winner = best_lane(nodes, heap, mine.cost, mine.slot);
    if (winner < 0) return node;
    const int taken = __shfl_sync(kAllLanes, mine.slot, winner);
    const double cost = __shfl_sync(kAllLanes, mine.cost, winner);
    const Successors next = heap.successors[taken];
    const int rank = heap.next_rank[taken], depth = nodes.depth[taken] + 1;
    const double taken_cost = nodes.cost[taken];
    __syncwarp();
    // lanes 0, 1: successors of what now waits in slot `taken`; lanes 2, 3: in slot `node`
    const double above = lane == 0 ? taken_cost : lane == 1 ? next.sibling : lane == 2 ? cost : next.child;
    const double ahead = __dadd_rn(
        above, candidates.cost(depth - 1 + (lane > 0) + (lane > 2), lane == 0 ? rank + 2 : int(lane == 2)));
    if (lane == 0) {
      nodes.cost[node] = cost;
      nodes.parent[node] = taken;
      nodes.rank[node] = rank;
      nodes.depth[node] = uint16_t(depth);
      heap.next_rank[node] = 0;
      heap.next_rank[taken] = uint16_t(rank + 1);
    }
    if (lane < 4) {
      Successors& to = heap.successors[lane < 2 ? taken : node];
      (lane % 2 ? to.child : to.sibling) = ahead;
    }
    __syncwarp();
    update_groups(mine, nodes, heap, lane, taken, next.sibling, node, next.child);
    __syncwarp();
  }
  return budget + 1;
}

}  // namespace kdtree
