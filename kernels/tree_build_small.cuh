// Taking up to 64 prefixes one after the other, by one warp, as tree_build_heap.cuh does, but with few instructions a
// node: a lane keeps the costs of slots lane and lane + 32 in registers, and what candidates cost lies in shared
// memory.
#pragma once
#include "tree_build_nodes.cuh"

namespace kdtree {

constexpr int kSmallTree = 64, kSmallColumns = kSmallTree + 2;  // a rank below 64, and two places ahead
constexpr int kMaxSmallRows = kSmallTree + 2;

struct SmallNode {
  double cost;
  uint16_t parent, rank, depth;
};

struct SmallTree {
  Successors successors[kSmallTree + 1];     // of the prefix that waits in slot p
  SmallNode nodes[kSmallTree + 1];
  uint32_t waiting[kSmallTree + 1];          // row << 16 | rank in `steps` of the prefix that waits in slot p
  double steps[kMaxSmallRows * kSmallColumns];  // what a candidate costs; kNeverTaken where there is none

  // The rank path of the prefix that waits in `slot` is smaller than that of another one.
  __device__ __noinline__ bool waits_before(int slot, int other) const {
    SmallNode a{0.0, uint16_t(slot), uint16_t(waiting[slot]), uint16_t((waiting[slot] >> 16) + 1)};
    SmallNode b{0.0, uint16_t(other), uint16_t(waiting[other]), uint16_t((waiting[other] >> 16) + 1)};
    const bool is_shorter = a.depth < b.depth;
    while (a.depth > b.depth) a = nodes[a.parent];
    while (b.depth > a.depth) b = nodes[b.parent];
    while (a.parent != b.parent) a = nodes[a.parent], b = nodes[b.parent];
    return a.rank != b.rank ? a.rank < b.rank : is_shorter;
  }

  // Among lanes whose costs agree in the upper half: the one with the smallest cost, then with the smallest rank path.
  __device__ __noinline__ uint32_t settle(bool taking_part, uint32_t low, int slot) const {
    const uint32_t least = __reduce_min_sync(kAllLanes, taking_part ? low : kAllLanes);
    const bool equal = taking_part && low == least;
    int best = equal ? slot : -1;
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      const int other = __shfl_xor_sync(kAllLanes, best, offset);
      if (other >= 0 && other != best && (best < 0 || waits_before(other, best))) best = other;
    }
    return __ballot_sync(kAllLanes, equal && slot == best);
  }
};

// The cost of a waiting prefix in two words, which compare alike.
struct SlotCost {
  uint32_t high = kNeverTakenHigh, low = 0;

  __device__ __forceinline__ void set(double cost) {
    high = uint32_t(cost_bits(cost) >> 32);
    low = uint32_t(cost_bits(cost));
  }
};

// Takes up to `budget` prefixes; the number of nodes, root included. One warp; tree.steps are filled.
__device__ int grow_small(SmallTree& tree, int budget, int lane) {
  SlotCost first, second;
  // lanes 0, 1 look ahead of what will wait in the slot of the node just taken from, lanes 2, 3 in that of the new node
  const int row_ahead = lane == 0 ? 0 : lane == 3 ? 2 : 1, rank_ahead = lane == 2;
  double* const successor = &tree.successors[0].sibling + lane % 2;
  if (lane == 0) {
    const double child = __dadd_rn(0.0, tree.steps[0]);
    first.set(child);
    tree.successors[0] = {__dadd_rn(0.0, tree.steps[1]), __dadd_rn(child, tree.steps[kSmallColumns])};
    tree.nodes[0] = {0.0, 0xffff, 0, 0};
    tree.waiting[0] = 0;
  }
  __syncwarp();
  for (int node = 1; node <= budget; ++node) {
    bool is_second = second.high < first.high || (second.high == first.high && second.low < first.low);
    if (second.high == first.high && second.low == first.low && first.high < kNeverTakenHigh)
      is_second = tree.waits_before(lane + kWarp, lane);
    const uint32_t high = is_second ? second.high : first.high, low = is_second ? second.low : first.low;
    const uint32_t least = __reduce_min_sync(kAllLanes, high);
    if (least >= kNeverTakenHigh) return node;
    const uint32_t seconds = __ballot_sync(kAllLanes, is_second);
    uint32_t lanes = __ballot_sync(kAllLanes, high == least);
    if (lanes & (lanes - 1)) lanes = tree.settle(high == least, low, is_second ? lane + kWarp : lane);
    const int winner = __ffs(int(lanes)) - 1, taken = winner + (((seconds >> winner) & 1) << 5);
    const Successors next = tree.successors[taken];
    const uint32_t place = tree.waiting[taken];
    const double above = tree.nodes[taken].cost;
    const uint64_t bits = uint64_t(least) << 32 | __shfl_sync(kAllLanes, low, winner);
    const double cost = __longlong_as_double(int64_t(bits));
    __syncwarp();
    if (lane == taken) first.set(next.sibling);
    if (lane + kWarp == taken) second.set(next.sibling);
    if (lane == node) first.set(next.child);
    if (lane + kWarp == node) second.set(next.child);  // node 64 has no slot: it is the last
    const int row = int(place >> 16) + row_ahead, rank = lane == 0 ? int(place & 0xffff) + 2 : rank_ahead;
    const double base = lane == 0 ? above : lane == 1 ? next.sibling : lane == 2 ? cost : next.child;
    const double sum = __dadd_rn(base, tree.steps[row * kSmallColumns + rank]);
    if (lane < 4) successor[2 * (lane < 2 ? taken : node)] = sum;
    if (lane == 4) tree.waiting[taken] = place + 1;
    if (lane == 5) tree.waiting[node] = ((place >> 16) + 1) << 16;
    if (lane == 6) tree.nodes[node] = {cost, uint16_t(taken), uint16_t(place), uint16_t((place >> 16) + 1)};
    __syncwarp();
  }
  return budget + 1;
}

}  // namespace kdtree
