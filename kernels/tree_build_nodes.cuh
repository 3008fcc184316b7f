// What the ways to grow a tree on CUDA share: the nodes taken so far, and the candidates.
#pragma once
#include "cuda_common.cuh"
#include "tree_walk.h"

namespace kdtree {

constexpr int kBuildThreads = 512, kMaxNodes = int(kMaxBudget) + 1;
constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr double kNeverTaken = __builtin_inf();

// A cost is a negated score: never below 0, so costs compare like their bits.
struct Node {
  double cost;
  int parent, rank, depth;
};

// Nodes in best-first order, in shared memory.
struct Nodes {
  double cost[kMaxNodes];
  int32_t parent[kMaxNodes], rank[kMaxNodes];
  uint16_t depth[kMaxNodes];
  int32_t num_nodes;

  __device__ void set_root() { cost[0] = 0.0, parent[0] = -1, rank[0] = depth[0] = 0; }
  __device__ Node node(int i) const { return {cost[i], parent[i], rank[i], depth[i]}; }
};

struct Candidates {
  const float* log_probs;  // [L, K]
  int max_depth, num_candidates;

  // What candidate `rank` of depth row + 1 adds to the cost. -inf is never taken, nor is what does not exist.
  __device__ __forceinline__ double cost(int row, int rank) const {
    const bool exists = row < max_depth && rank < num_candidates;
    return exists ? -double(log_probs[int64_t(row) * num_candidates + rank]) : kNeverTaken;
  }
};

__device__ __forceinline__ uint64_t cost_bits(double cost) { return uint64_t(__double_as_longlong(cost)); }

// Costs that will wait once a waiting prefix is taken: its next sibling's and its first child's.
struct Successors {
  double sibling, child;
};

__device__ __forceinline__ uint32_t high_bits(double cost) { return uint32_t(cost_bits(cost) >> 32); }
constexpr uint32_t kNeverTakenHigh = 0x7ff00000u;

}  // namespace kdtree
