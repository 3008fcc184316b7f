// Taking prefixes one after the other, by one warp, for trees of up to kNodes nodes: all that a step waits for lies in
// registers. The waiting prefixes are those of the CPU's heap: of every node taken, its best child not yet taken. Those of
// node n wait in lane n % 32, best first; of its first one a lane knows ahead what will wait once it is taken. So a step
// is a minimum over the lanes, one exchange and an insertion; loads and additions end while the next step runs.
#pragma once
#include "tree_build_nodes.cuh"

namespace kdtree {

__device__ __forceinline__ double load_shared_double(uint32_t at) {
  double x;
  asm volatile("ld.shared.f64 %0, [%1];" : "=d"(x) : "r"(at) : "memory");
  return x;
}

__device__ __forceinline__ uint32_t opaque(uint32_t x) {
  asm volatile("mov.b32 %0, %0;" : "+r"(x));
  return x;
}

// Done here, not where the compiler thinks the sum is needed.
__device__ __forceinline__ double add_here(double a, double b) {
  double sum;
  asm volatile("add.rn.f64 %0, %1, %2;" : "=d"(sum) : "d"(a), "d"(b));
  return sum;
}

// kMaxRows: rows of `steps` that fit, two more than the deepest depth needs.
template <int kNodes, int kMaxRows>
struct WarpTree {
  static constexpr int kWaiting = kNodes / kWarp;  // in a lane

  // A node, or a prefix that waits.
  struct alignas(16) Entry {
    uint32_t low = 0, high = kNeverTakenHigh;  // words of the cost, which compare as it does
    int at = kNodes, parent = 0;               // depth * kNodes + rank; a rank is below kNodes, as there are no more nodes

    __device__ __forceinline__ double cost() const { return __hiloint2double(int(high), int(low)); }
    __device__ __forceinline__ void set_cost(double cost) { high = high_bits(cost), low = uint32_t(cost_bits(cost)); }
    __device__ __forceinline__ int depth() const { return int(unsigned(at) / kNodes); }
    __device__ __forceinline__ int rank() const { return int(unsigned(at) % kNodes); }
    __device__ __forceinline__ bool costs_as(const Entry& other) const { return high == other.high && low == other.low; }
  };

  Entry nodes[kNodes + 1];         // best first; node 0 is the root
  double steps[kMaxRows * kNodes];  // what a candidate costs, from depth 1; kNeverTaken where there is none
  int num_nodes;

  __device__ Node node(int i) const { return {nodes[i].cost(), nodes[i].parent, nodes[i].rank(), nodes[i].depth()}; }

  __device__ static bool has_room(int max_depth) { return min(max_depth, kNodes) + 2 <= kMaxRows; }

  // All threads of the block.
  __device__ void load_steps(const Candidates& candidates) {
    const int num_steps = (min(candidates.max_depth, kNodes) + 2) * kNodes;
    for (int i = threadIdx.x; i < num_steps; i += kBuildThreads)
      steps[i] = candidates.cost(int(unsigned(i) / kNodes), int(unsigned(i) % kNodes));
  }

  // Of two waiting prefixes of equal cost: whether the rank path of `a` is smaller. Neither extends the other.
  __device__ __noinline__ bool path_before(Entry a, Entry b) const {
    while (a.depth() > b.depth()) a = nodes[a.parent];
    while (b.depth() > a.depth()) b = nodes[b.parent];
    while (a.parent != b.parent) a = nodes[a.parent], b = nodes[b.parent];
    return a.at < b.at;
  }

  // Among lanes whose first prefixes agree in `high`: the one to take.
  __device__ __noinline__ int settle(bool takes_part, Entry mine, int lane) const {
    const uint32_t least = __reduce_min_sync(kAllLanes, takes_part ? mine.low : kAllLanes);
    Entry best = mine;
    int best_lane = takes_part && mine.low == least ? lane : kWarp;
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      Entry other = mine;
      other.at = __shfl_xor_sync(kAllLanes, best.at, offset);
      other.parent = __shfl_xor_sync(kAllLanes, best.parent, offset);
      const int other_lane = __shfl_xor_sync(kAllLanes, best_lane, offset);
      if (other_lane < kWarp && other_lane != best_lane && (best_lane == kWarp || path_before(other, best)))
        best = other, best_lane = other_lane;
    }
    return best_lane;
  }

  // Puts `added` among a lane's prefixes, if it can be taken at all. The last of them is empty, or comes too late.
  __device__ __forceinline__ void insert(const Entry& added, Entry (&waiting)[kWaiting]) const {
    bool is_before[kWaiting], ties = false;
#pragma unroll
    for (int i = 0; i < kWaiting; ++i) {
      is_before[i] = added.high < waiting[i].high || (added.high == waiting[i].high && added.low < waiting[i].low);
      ties |= added.costs_as(waiting[i]);
    }
    if (ties && added.high < kNeverTakenHigh) {
#pragma unroll
      for (int i = 0; i < kWaiting; ++i)
        if (added.costs_as(waiting[i])) is_before[i] = path_before(added, waiting[i]);
    }
#pragma unroll
    for (int i = kWaiting - 1; i > 0; --i)
      waiting[i] = is_before[i - 1] ? waiting[i - 1] : is_before[i] ? added : waiting[i];
    if (is_before[0]) waiting[0] = added;
  }

  // What decides which costs wait once a lane's first prefix is taken; loaded while the step goes on.
  struct Ahead {
    double parent_cost, sibling_step, child_step;
  };

  // The addresses are 32-bit numbers that the compiler cannot see through: else it computes them anew in every step.
  __device__ __forceinline__ Ahead load_ahead(const Entry& first, uint32_t nodes_at, uint32_t steps_at) const {
    return {load_shared_double(nodes_at + first.parent * int(sizeof(Entry))),
            load_shared_double(steps_at + (first.at + 1) * 8), load_shared_double(steps_at + (first.depth() + 1) * kNodes * 8)};
  }

  // Takes up to `budget` prefixes. One warp; the steps are loaded.
  __device__ void grow(int budget, int lane) {
    const uint32_t nodes_at = opaque(shared_address(nodes)), steps_at = opaque(shared_address(steps) - kNodes * 8);
    lane = int(opaque(lane));
    Entry waiting[kWaiting];
    Ahead ahead{};
    if (lane == 0) {
      Entry root;
      root.set_cost(0.0);
      root.at = 0, root.parent = -1;
      nodes[0] = root;
      waiting[0].set_cost(__dadd_rn(0.0, steps[0]));
    }
    __syncwarp();
    if (lane == 0) ahead = load_ahead(waiting[0], nodes_at, steps_at);
    int node = 1;
    for (; node <= budget; ++node) {
      const uint32_t least = __reduce_min_sync(kAllLanes, waiting[0].high);
      const double sibling = add_here(ahead.parent_cost, ahead.sibling_step);
      const double child = add_here(waiting[0].cost(), ahead.child_step);
      const uint32_t lanes = __ballot_sync(kAllLanes, waiting[0].high == least);
      if (least >= kNeverTakenHigh) break;
      int winner = __ffs(int(lanes)) - 1;
      if (lanes & (lanes - 1)) winner = settle(waiting[0].high == least, waiting[0], lane);
      const bool is_taken = lane == winner, is_parent = lane == node % kWarp;
      Entry below, added;
      below.set_cost(__shfl_sync(kAllLanes, child, winner));
      below.at = (__shfl_sync(kAllLanes, waiting[0].depth(), winner) + 1) * kNodes;
      below.parent = node;
      if (is_parent) added = below;
      if (is_taken) {
        nodes[node] = waiting[0];
        added.set_cost(sibling);
        added.at = waiting[0].at + 1;
        added.parent = waiting[0].parent;
#pragma unroll
        for (int i = 0; i + 1 < kWaiting; ++i) waiting[i] = waiting[i + 1];
        waiting[kWaiting - 1] = Entry();
      }
      __syncwarp();
      insert(added, waiting);
      if (winner == node % kWarp && is_taken) insert(below, waiting);
      if (is_taken || is_parent) ahead = load_ahead(waiting[0], nodes_at, steps_at);
    }
    if (lane == 0) num_nodes = node;
  }
};

}  // namespace kdtree
