// Growing a tree of up to 64 nodes by one warp, many prefixes a round. The waiting prefixes are those of the CPU's heap: of
// every node taken, its best child not yet taken; slot p holds that of node p, in registers of lane p % 32. What will wait
// once a prefix is taken, its next sibling and its first child, costs no less than it does. So a round takes every waiting
// prefix that costs less than whatever would then wait, without sorting them; where equal costs allow none, the best one by
// its rank path. The last round may take too many: at the end all are sorted, and the first `budget` are the tree.
//
// A warp alone is bound by the number of its instructions (3 to 4 cycles each): one prefix at a time, with a minimum over
// the lanes and an insertion, took 350 cycles a node.
#pragma once
#include "tree_build_nodes.cuh"

namespace kdtree {

constexpr int kSmallTree = 64, kSmallSlots = kSmallTree / kWarp;
constexpr int kMaxTaken = 2 * kSmallTree - 1;  // a round begins with fewer than 64, and takes at most all that wait
constexpr int kMaxSmallRows = kSmallTree + 2;  // depths of `steps`, two past the deepest

__device__ __forceinline__ double load_shared_double(uint32_t at) {
  double x;
  asm volatile("ld.shared.f64 %0, [%1];" : "=d"(x) : "r"(at) : "memory");
  return x;
}

// A number that the compiler cannot see through: else it computes the addresses of shared memory anew in every round.
__device__ __forceinline__ uint32_t opaque(uint32_t x) {
  asm volatile("mov.b32 %0, %0;" : "+r"(x));
  return x;
}

// A prefix that was taken, or waits. `at` is depth * 64 + rank; a rank is below 64, as there are no more nodes.
struct SmallPrefix {
  double cost;
  int at, parent;  // among the taken; 0 is the root

  __device__ __forceinline__ int depth() const { return int(unsigned(at) / kSmallTree); }
  __device__ __forceinline__ int rank() const { return int(unsigned(at) % kSmallTree); }
};

struct SmallTree {
  SmallPrefix taken[kMaxTaken + 1], nodes[kSmallTree + 1];  // as they came; best first
  double child_cost[kMaxTaken + 1];                         // of the first child of one that was taken
  double steps[kMaxSmallRows * kSmallTree];                 // what a candidate costs, from depth 1; kNeverTaken: none
  int place[kMaxTaken + 1];                                 // of one that was taken, among the nodes
  int num_taken;                                            // besides the root

  __device__ Node node(int i) const { return {nodes[i].cost, nodes[i].parent, nodes[i].rank(), nodes[i].depth()}; }

  // All threads of the block.
  __device__ void load_steps(const Candidates& candidates) {
    const int num_steps = (min(candidates.max_depth, kSmallTree) + 2) * kSmallTree;
    for (int i = threadIdx.x; i < num_steps; i += kBuildThreads)
      steps[i] = candidates.cost(int(unsigned(i) / kSmallTree), int(unsigned(i) % kSmallTree));
  }

  // Of two prefixes of equal cost: whether the rank path of `a` is smaller; a prefix comes before its extension.
  __device__ __noinline__ bool path_before(SmallPrefix a, SmallPrefix b) const {
    const bool is_shorter = a.depth() < b.depth();
    while (a.depth() > b.depth()) a = taken[a.parent];
    while (b.depth() > a.depth()) b = taken[b.parent];
    while (a.parent != b.parent) a = taken[a.parent], b = taken[b.parent];
    return a.at != b.at ? a.at < b.at : is_shorter;
  }

  // Whether this lane's `slots` (a bit each) hold the best of the waiting prefixes that cost the least; they all cost as
  // much as `waiting`. Then that slot's bit, else 0. The whole warp.
  __device__ __noinline__ uint32_t best_slot(uint32_t slots, SmallPrefix first, SmallPrefix second, int lane) const {
    const bool takes_second = slots == 2 || (slots == 3 && path_before(second, first));
    SmallPrefix best = takes_second ? second : first;
    int best_lane = slots ? lane : kWarp;
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      SmallPrefix other;
      other.at = __shfl_xor_sync(kAllLanes, best.at, offset);
      other.parent = __shfl_xor_sync(kAllLanes, best.parent, offset);
      const int other_lane = __shfl_xor_sync(kAllLanes, best_lane, offset);
      if (other_lane < kWarp && other_lane != best_lane && (best_lane == kWarp || path_before(other, best)))
        best = other, best_lane = other_lane;
    }
    return lane != best_lane ? 0 : takes_second ? 2 : 1;
  }

  // Where no prefix costs less than what would wait: this lane's slots to take, a bit each, which is one of the warp.
  __device__ __forceinline__ uint32_t take_one(const SmallPrefix (&waiting)[kSmallSlots], int lane) const {
    const uint32_t high[] = {high_bits(waiting[0].cost), high_bits(waiting[1].cost)};
    const uint32_t least = __reduce_min_sync(kAllLanes, min(high[0], high[1]));
    if (least >= kNeverTakenHigh) return 0;
    const uint32_t low[] = {high[0] == least ? uint32_t(cost_bits(waiting[0].cost)) : kAllLanes,
                            high[1] == least ? uint32_t(cost_bits(waiting[1].cost)) : kAllLanes};
    const uint32_t least_low = __reduce_min_sync(kAllLanes, min(low[0], low[1]));
    const uint32_t slots = uint32_t(high[0] == least && low[0] == least_low) |
                           uint32_t(high[1] == least && low[1] == least_low) << 1;
    const uint32_t lanes = __ballot_sync(kAllLanes, slots), twice = __ballot_sync(kAllLanes, slots == 3);
    if ((lanes & (lanes - 1)) == 0 && twice == 0) return slots;
    return best_slot(slots, waiting[0], waiting[1], lane);
  }

  // Takes at least `budget` prefixes, or all there are. One warp; the steps are loaded.
  __device__ void grow(int budget, int thread) {
    const int lane = int(opaque(uint32_t(thread)));
    const uint32_t steps_at = opaque(shared_address(steps) - kSmallTree * 8), lanes_before = (1u << lane) - 1;
    SmallPrefix waiting[kSmallSlots];
    double above[kSmallSlots], sibling[kSmallSlots], child[kSmallSlots];
#pragma unroll
    for (int j = 0; j < kSmallSlots; ++j) {
      waiting[j] = {kNeverTaken, kSmallTree, lane + j * kWarp};
      above[j] = 0.0;
      sibling[j] = child[j] = kNeverTaken;
    }
    const auto look_ahead = [&](int j) {
      sibling[j] = __dadd_rn(above[j], load_shared_double(steps_at + (waiting[j].at + 1) * 8));
      child[j] = __dadd_rn(waiting[j].cost, load_shared_double(steps_at + (waiting[j].depth() + 1) * kSmallTree * 8));
    };
    if (lane == 0) {
      taken[0] = {0.0, 0, -1};
      waiting[0].cost = __dadd_rn(0.0, steps[0]);
      look_ahead(0);
    }
    int count = 0;
    while (count < budget) {
      uint32_t ahead = kNeverTakenHigh;
#pragma unroll
      for (int j = 0; j < kSmallSlots; ++j) ahead = min(ahead, min(high_bits(sibling[j]), high_bits(child[j])));
      const uint32_t bound = __reduce_min_sync(kAllLanes, ahead);
      uint32_t lanes[kSmallSlots];
#pragma unroll
      for (int j = 0; j < kSmallSlots; ++j) lanes[j] = __ballot_sync(kAllLanes, high_bits(waiting[j].cost) < bound);
      if ((lanes[0] | lanes[1]) == 0) {
        const uint32_t slots = take_one(waiting, lane);
#pragma unroll
        for (int j = 0; j < kSmallSlots; ++j) lanes[j] = __ballot_sync(kAllLanes, slots >> j & 1);
        if ((lanes[0] | lanes[1]) == 0) break;
      }
      const int begin = count;
#pragma unroll
      for (int j = 0; j < kSmallSlots; ++j) {
        if (lanes[j] >> lane & 1) {
          const int to = count + 1 + __popc(lanes[j] & lanes_before);
          taken[to] = waiting[j];
          child_cost[to] = child[j];
        }
        count += __popc(lanes[j]);
      }
      __syncwarp();
#pragma unroll
      for (int j = 0; j < kSmallSlots; ++j) {
        const int slot = lane + j * kWarp;
        const bool is_new = slot > begin && slot <= count, was_taken = lanes[j] >> lane & 1;
        if (was_taken) waiting[j].cost = sibling[j], ++waiting[j].at;
        if (is_new) {
          above[j] = taken[slot].cost;
          waiting[j].cost = child_cost[slot];
          waiting[j].at = (taken[slot].depth() + 1) * kSmallTree;
        }
        if (is_new || was_taken) look_ahead(j);
      }
    }
    if (lane == 0) num_taken = count;
  }

  // All threads of the block: sorts what was taken into the nodes of a tree of this budget; their number.
  __device__ int sort(int budget) {
    constexpr int kSharers = kBuildThreads / (kMaxTaken + 1);  // threads of one prefix
    const int i = 1 + threadIdx.x / kSharers;
    const SmallPrefix mine = taken[min(i, num_taken)];
    int num_before = 0, num_equal = 0;
#pragma unroll 4
    for (int other = 1 + threadIdx.x % kSharers; other <= num_taken; other += kSharers) {
      num_before += taken[other].cost < mine.cost;
      num_equal += taken[other].cost == mine.cost && other != i;
    }
    for (int other = 1 + threadIdx.x % kSharers; num_equal > 0 && other <= num_taken; other += kSharers)
      if (taken[other].cost == mine.cost && other != i) num_before += path_before(taken[other], mine);
#pragma unroll
    for (int offset = kSharers / 2; offset > 0; offset /= 2) num_before += __shfl_xor_sync(kAllLanes, num_before, offset);
    const bool is_first = threadIdx.x % kSharers == 0;
    if (is_first && i <= num_taken) place[i] = num_before + 1;
    if (threadIdx.x == 0) nodes[0] = {0.0, 0, -1}, place[0] = 0;
    __syncthreads();
    if (is_first && i <= num_taken && num_before < budget)
      nodes[num_before + 1] = {mine.cost, mine.at, place[mine.parent]};
    __syncthreads();
    return min(num_taken, budget) + 1;
  }
};

}  // namespace kdtree
