// The heaviest prefixes of per-depth marginals, best first. One block a stream: one warp takes prefixes in order while the
// other warps look for repeated token ids; then all write the tree.
//
// The waiting prefixes are the same as on the CPU: of every node taken, its best child not yet taken. Child number
// next_rank[p] of node p waits in slot p. It enters at the moment its parent or its better sibling is taken, so its key, and
// the keys of the two prefixes that will wait once it is taken itself, are computed one step ahead. The best of all slots is
// found by minima over the warp: directly for up to 64 slots, else by groups of 32 whose best a lane remembers.
#include "cuda_common.cuh"
#include "tree_walk.h"

namespace kdtree {
namespace {

constexpr int kThreads = 512, kMaxNodes = kMaxBudget + 1, kSmallTree = 64;
constexpr int64_t kMaxCandidates = 4096;  // K
constexpr int kMaxTableBytes = 48 * 1024;
constexpr uint32_t kAll = 0xffffffffu;
constexpr uint64_t kEmpty = ~uint64_t{0};  // behind every score

// Scores are sums of log-probs, so never above 0: the bits below the sign rise as the score falls.
__device__ __forceinline__ uint64_t key_of(double score) {
  return uint64_t(__double_as_longlong(score)) & 0x7fffffffffffffffu;
}
__device__ __forceinline__ double score_of(uint64_t key) {
  return key == 0 ? 0.0 : __longlong_as_double(int64_t(key | 0x8000000000000000u));
}

// Keys that will wait once a waiting prefix is taken: its next sibling's and its first child's.
struct Successors {
  uint64_t sibling, child;
};

struct Nodes {
  double score[kMaxNodes];
  int32_t parent[kMaxNodes], rank[kMaxNodes];
  uint16_t depth[kMaxNodes];
  uint16_t next_rank[kMaxNodes];       // of the child that waits in slot p
  Successors successors[kMaxNodes];    // of the prefix that waits in slot p
  uint64_t key[kMaxNodes];             // of the prefix that waits in slot p; unused by small trees
  int32_t num_nodes, repeats;
};

struct Candidates {
  const float* log_probs;  // [L, K]
  int max_depth, num_candidates;

  // Key of the prefix that extends one of key `above` by candidate `rank` of depth row + 1. -inf is never taken.
  __device__ uint64_t extend(uint64_t above, int row, int rank) const {
    if (above == kEmpty || row >= max_depth || rank >= num_candidates) return kEmpty;
    const float log_prob = log_probs[int64_t(row) * num_candidates + rank];
    return log_prob > -INFINITY ? key_of(__dadd_rn(score_of(above), double(log_prob))) : kEmpty;
  }
};

__device__ __forceinline__ bool waits_before(const Nodes& nodes, int slot, int other) {  // of two equal keys
  return path_less({0.0, slot, nodes.depth[slot] + 1, nodes.next_rank[slot]},
                   {0.0, other, nodes.depth[other] + 1, nodes.next_rank[other]}, nodes.parent, nodes.rank);
}

// Among lanes whose keys agree in the upper half: the one with the smallest key, then with the smallest rank path.
__device__ __noinline__ uint32_t settle(const Nodes& nodes, bool taking_part, uint32_t low, int slot) {
  const uint32_t least = __reduce_min_sync(kAll, taking_part ? low : kAll);
  const bool equal = taking_part && low == least;
  int best = equal ? slot : -1;
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const int other = __shfl_xor_sync(kAll, best, offset);
    if (other >= 0 && other != best && (best < 0 || waits_before(nodes, other, best))) best = other;
  }
  return __ballot_sync(kAll, equal && slot == best);
}

// The lane that holds the best of the warp's (key, slot), or -1 where all are empty.
__device__ __forceinline__ int best_lane(const Nodes& nodes, uint64_t key, int slot) {
  const uint32_t high = uint32_t(key >> 32), least = __reduce_min_sync(kAll, high);
  if (least == kAll) return -1;
  uint32_t lanes = __ballot_sync(kAll, high == least);
  if (lanes & (lanes - 1)) lanes = settle(nodes, high == least, uint32_t(key), slot);
  return __ffs(int(lanes)) - 1;
}

// A lane's share of the waiting prefixes, and the best of it.
template <bool kSmall>
struct Queue {
  int lane, slot;     // slot and key of the best
  uint64_t key;
  uint64_t first, second;  // small trees: slots lane and lane + 32

  __device__ Queue(int lane) : lane(lane), slot(lane), key(kEmpty), first(kEmpty), second(kEmpty) {}

  // Slot `taken` now waits with key `sibling`, slot `added` with `child`.
  __device__ __forceinline__ void update(Nodes& nodes, int taken, uint64_t sibling, int added, uint64_t child) {
    if constexpr (kSmall) {
      if (lane == taken % kWarp) (taken < kWarp ? first : second) = sibling;
      if (lane == added % kWarp && added < kSmallTree) (added < kWarp ? first : second) = child;
      const bool is_second = second < first || (second == first && first != kEmpty &&
                                                waits_before(nodes, lane + kWarp, lane));
      key = is_second ? second : first;
      slot = is_second ? lane + kWarp : lane;
    } else {
      const int group = taken / kWarp, at = group * kWarp + lane;
      const uint64_t waiting = at == taken ? sibling : at == added ? child : nodes.key[at];
      const int best = best_lane(nodes, waiting, at);
      const uint64_t best_key = __shfl_sync(kAll, waiting, best & 31);
      if (lane == group) key = best < 0 ? kEmpty : best_key, slot = group * kWarp + (best & 31);
      if (lane == added / kWarp && lane != group &&
          (child < key || (child == key && child != kEmpty && waits_before(nodes, added, slot))))
        key = child, slot = added;
      if (lane == 0) nodes.key[taken] = sibling, nodes.key[added] = child;
    }
  }
};

// Takes up to `budget` prefixes; the number of nodes, root included. One warp.
template <bool kSmall>
__device__ int grow(const Candidates& candidates, Nodes& nodes, int budget, int lane) {
  Queue<kSmall> queue(lane);
  if (lane == 0) {
    const uint64_t child = candidates.extend(0, 0, 0);
    nodes.score[0] = 0.0;
    nodes.parent[0] = -1;
    nodes.rank[0] = nodes.depth[0] = nodes.next_rank[0] = 0;
    nodes.successors[0] = {candidates.extend(0, 0, 1), candidates.extend(child, 1, 0)};
    nodes.key[0] = queue.key = queue.first = child;
  }
  __syncwarp();
  for (int node = 1; node <= budget; ++node) {
    const int winner = best_lane(nodes, queue.key, queue.slot);
    if (winner < 0) return node;
    const int taken = __shfl_sync(kAll, queue.slot, winner);
    const uint64_t key = __shfl_sync(kAll, queue.key, winner);
    const Successors next = nodes.successors[taken];
    const int rank = nodes.next_rank[taken], depth = nodes.depth[taken] + 1;
    const uint64_t above = key_of(nodes.score[taken]);
    __syncwarp();
    // lanes 0, 1: successors of what now waits in slot `taken`; lanes 2, 3: in slot `node`
    const uint64_t ahead = candidates.extend(lane == 0 ? above : lane == 1 ? next.sibling : lane == 2 ? key : next.child,
                                             depth - 1 + (lane > 0) + (lane > 2), lane == 0 ? rank + 2 : lane == 2);
    if (lane == 0) {
      nodes.score[node] = score_of(key);
      nodes.parent[node] = taken;
      nodes.rank[node] = rank;
      nodes.depth[node] = uint16_t(depth);
      nodes.next_rank[node] = 0;
      nodes.next_rank[taken] = uint16_t(rank + 1);
    }
    if (lane < 4) (lane % 2 ? nodes.successors[lane < 2 ? taken : node].child
                            : nodes.successors[lane < 2 ? taken : node].sibling) = ahead;
    __syncwarp();
    queue.update(nodes, taken, next.sibling, node, next.child);
    __syncwarp();
  }
  return budget + 1;
}

// Whether two of the row's ids are equal: a hash table of positions, half full at most. One warp.
__device__ bool has_repeats(const int64_t* ids, int num_ids, int* table, int table_size, int lane) {
  for (int i = lane; i < table_size; i += kWarp) table[i] = 0;
  __syncwarp();
  bool repeats = false;
  for (int k = lane; k < num_ids; k += kWarp) {
    const int64_t id = ids[k];
    int at = int((uint64_t(id) * 0x9e3779b97f4a7c15u) >> 40) & (table_size - 1);
    for (int step = 0; step < table_size; ++step, at = (at + 1) & (table_size - 1)) {
      const int other = atomicCAS(&table[at], 0, k + 1);
      if (other == 0) break;
      if (ids[other - 1] == id) {
        repeats = true;
        break;
      }
    }
  }
  __syncwarp();
  return repeats;
}

__device__ bool values_are_valid(const float* log_probs, const int64_t* token_ids, int max_depth, int num_candidates) {
  bool valid = true;
  for (int i = threadIdx.x; i < max_depth * num_candidates; i += kThreads) {
    const float bound = i % num_candidates == 0 ? 0.0f : log_probs[i - 1];
    valid &= log_probs[i] <= bound && token_ids[i] >= 0;
  }
  return valid;
}

__device__ void write_tree(const TreeBuildArgs& a, const Nodes& nodes, int num_nodes) {
  const int64_t b = blockIdx.x, num_slots = a.max_budget + 1, num_words = num_bit_words(num_slots);
  const int64_t* token_ids = a.token_ids + b * a.max_depth * a.num_candidates;
  for (int i = threadIdx.x; i < num_slots; i += kThreads) {
    const int64_t at = b * num_slots + i;
    const bool used = i < num_nodes;
    const int depth = used ? nodes.depth[i] : -1;
    a.token[at] = !used ? -1 : i == 0 ? a.bonus[b] : token_ids[(depth - 1) * a.num_candidates + nodes.rank[i]];
    a.parent[at] = used ? nodes.parent[i] : -1;
    a.depth[at] = depth;
    a.log_prob[at] = used ? nodes.score[i] : -INFINITY;
  }
  for (int i = threadIdx.x; i < num_slots * num_words; i += kThreads) {
    const int node = int(i / num_words), word = int(i % num_words);
    uint64_t bits = 0;
    for (int n = node < num_nodes ? node : -1; n >= word * 64; n = nodes.parent[n])
      if (n / 64 == word) bits |= uint64_t{1} << (n % 64);
    a.ancestor_bits[b * num_slots * num_words + i] = int64_t(bits);
  }
}

__global__ void __launch_bounds__(kThreads, 1) tree_build_kernel(TreeBuildArgs a, int table_size, int num_tables) {
  extern __shared__ __align__(16) unsigned char shared[];
  Nodes& nodes = *reinterpret_cast<Nodes*>(shared);
  int* tables = reinterpret_cast<int*>(shared + sizeof(Nodes));  // [num_tables, table_size]
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (threadIdx.x == 0) nodes.num_nodes = nodes.repeats = 0;
  for (int i = threadIdx.x; i < kMaxNodes; i += kThreads) nodes.key[i] = kEmpty;
  wait_for_previous_kernel();
  allow_next_kernel();
  const int64_t b = blockIdx.x;
  const int max_depth = int(a.max_depth), num_candidates = int(a.num_candidates), budget = a.budget[b];
  const float* log_probs = a.log_probs + b * max_depth * num_candidates;
  const int64_t* token_ids = a.token_ids + b * max_depth * num_candidates;
  int status = budget < 0 || budget > a.max_budget || a.bonus[b] < 0 ? kOutOfRange : kOk;
  const bool invalid = !values_are_valid(log_probs, token_ids, max_depth, num_candidates);
  if (__syncthreads_or(invalid) && status == kOk) status = kInvalidCandidates;

  if (status == kOk && warp == 0) {
    const Candidates candidates{log_probs, max_depth, num_candidates};
    const int count = budget <= kSmallTree ? grow<true>(candidates, nodes, budget, lane)
                                           : grow<false>(candidates, nodes, budget, lane);
    if (lane == 0) nodes.num_nodes = count;
  } else if (status == kOk && warp <= num_tables) {
    bool found = false;
    for (int row = warp - 1; row < max_depth; row += num_tables)
      found |= has_repeats(token_ids + int64_t(row) * num_candidates, num_candidates, tables + (warp - 1) * table_size,
                           table_size, lane);
    if (found) nodes.repeats = 1;
  }
  __syncthreads();
  if (status == kOk && nodes.repeats) status = kInvalidCandidates;
  const int count = status == kOk ? nodes.num_nodes : 0;
  write_tree(a, nodes, count);
  if (threadIdx.x == 0) {
    a.num_nodes[b] = count;
    a.status[b] = status;
  }
}

}  // namespace

int tree_build_cuda(const TreeBuildArgs& a, void* stream) {
  if (a.max_budget < 0 || a.max_budget > kMaxBudget || a.max_depth > 65535 || a.num_candidates > kMaxCandidates)
    return kUnsupported;
  if (a.num_streams == 0) return kOk;
  int table_size = 2;
  while (table_size < 2 * a.num_candidates) table_size *= 2;
  int num_tables = kMaxTableBytes / (table_size * int(sizeof(int)));
  if (num_tables > kThreads / kWarp - 1) num_tables = kThreads / kWarp - 1;
  static_assert(sizeof(Nodes) + kMaxTableBytes <= kMaxSharedBytes);
  const size_t shared_bytes = sizeof(Nodes) + size_t(num_tables) * table_size * sizeof(int);
  return launch(tree_build_kernel, {dim3(a.num_streams), dim3(kThreads), shared_bytes, 1, true}, stream, a, table_size,
                num_tables);
}

}  // namespace kdtree
