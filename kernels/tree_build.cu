// The heaviest prefixes of per-depth marginals, best first. One block a stream: it checks the candidates, grows the
// tree and writes it. Up to 64 nodes are taken one after the other by a warp; larger trees grow level by level, and one
// after the other where the costs have so many ties that the level-wise bounds do not hold.
#include "tree_build_heap.cuh"
#include "tree_build_levels.cuh"
#include "tree_build_small.cuh"

namespace kdtree {
namespace {

constexpr int64_t kMaxBuildCandidates = 4096;  // K

// Shared memory of the kernel: what is needed one after the other shares a place.
struct BuildShared {
  Nodes nodes;
  union {
    int tables[kMaxNodes * 18];
    Levels levels;
    Heap heap;
    struct {
      SmallTree tree;
      int tables[kMaxNodes * 8];
    } small;
  };
  __device__ BuildShared() {}
};
static_assert(sizeof(BuildShared) <= kMaxSharedBytes);

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

// Whether each row falls from at most 0, without NaN, and no id is negative: this thread's share.
__device__ bool values_are_valid(const Candidates& candidates, const int64_t* token_ids) {
  bool valid = true;
  for (int i = threadIdx.x; i < candidates.max_depth * candidates.num_candidates; i += kBuildThreads) {
    const float most = i % candidates.num_candidates == 0 ? 0.0f : candidates.log_probs[i - 1];
    valid &= candidates.log_probs[i] <= most && token_ids[i] >= 0;
  }
  return valid;
}

// Whether an id comes twice in a row: the share of warp `warp` of `num_warps`, of which as many work as tables fit.
template <int kTableInts>
__device__ bool rows_repeat(const Candidates& candidates, const int64_t* token_ids, int (&tables)[kTableInts],
                            int table_size, int warp, int num_warps) {
  const int num_tables = min(kTableInts / table_size, num_warps);
  bool repeats = false;
  for (int row = warp; warp < num_tables && row < candidates.max_depth; row += num_tables)
    repeats |= has_repeats(token_ids + int64_t(row) * candidates.num_candidates, candidates.num_candidates,
                           tables + warp * table_size, table_size, int(threadIdx.x) % kWarp);
  return repeats;
}

// All threads; the number of nodes, root included, or 0 for candidates that are not valid.
__device__ int grow_large_tree(const Candidates& candidates, const int64_t* token_ids, BuildShared& shared, int budget,
                               int table_size) {
  Nodes& nodes = shared.nodes;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const bool repeats = rows_repeat(candidates, token_ids, shared.tables, table_size, warp, kBuildThreads / kWarp);
  if (__syncthreads_or(repeats || !values_are_valid(candidates, token_ids))) return 0;
  const int num_nodes = LevelGrower(candidates, shared.levels, budget).grow(nodes);
  if (num_nodes > 0) return num_nodes;
  __syncthreads();
  if (warp == 0) {
    const int count = grow_large(candidates, nodes, shared.heap, budget, lane);
    if (lane == 0) nodes.num_nodes = count;
  }
  __syncthreads();
  return nodes.num_nodes;
}

// The same for a budget of at most 64: one warp grows while the others look for repeated ids.
__device__ int grow_small_tree(const Candidates& candidates, const int64_t* token_ids, BuildShared& shared, int budget,
                               int table_size) {
  Nodes& nodes = shared.nodes;
  SmallTree& tree = shared.small.tree;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int num_rows = min(candidates.max_depth, kSmallTree) + 2;
  for (int i = threadIdx.x; i < num_rows * kSmallColumns; i += kBuildThreads)
    tree.steps[i] = candidates.cost(i / kSmallColumns, i % kSmallColumns);
  if (__syncthreads_or(!values_are_valid(candidates, token_ids))) return 0;
  bool repeats = false;
  if (warp == 0) {
    const int count = grow_small(tree, budget, lane);
    if (lane == 0) nodes.num_nodes = count;
  } else {
    repeats = rows_repeat(candidates, token_ids, shared.small.tables, table_size, warp - 1, kBuildThreads / kWarp - 1);
  }
  if (__syncthreads_or(repeats)) return 0;
  for (int i = 1 + threadIdx.x; i < nodes.num_nodes; i += kBuildThreads) {
    const SmallNode node = tree.nodes[i];
    nodes.cost[i] = node.cost;
    nodes.parent[i] = node.parent;
    nodes.rank[i] = node.rank;
    nodes.depth[i] = node.depth;
  }
  return nodes.num_nodes;
}

__device__ void write_tree(const TreeBuildArgs& a, const Nodes& nodes, int num_nodes) {
  const int64_t b = blockIdx.x, num_slots = a.max_budget + 1, num_words = num_bit_words(num_slots);
  const int64_t* token_ids = a.token_ids + b * a.max_depth * a.num_candidates;
  for (int i = threadIdx.x; i < num_slots; i += kBuildThreads) {
    const int64_t at = b * num_slots + i;
    const bool used = i < num_nodes;
    const int depth = used ? nodes.depth[i] : -1;
    a.token[at] = !used ? -1 : i == 0 ? a.bonus[b] : token_ids[(depth - 1) * a.num_candidates + nodes.rank[i]];
    a.parent[at] = used ? nodes.parent[i] : -1;
    a.depth[at] = depth;
    a.log_prob[at] = !used ? -INFINITY : nodes.cost[i] == 0.0 ? 0.0 : -nodes.cost[i];
  }
  const int words = int(num_words);  // 32-bit: dividing 64-bit numbers is slow
  for (int i = threadIdx.x; i < int(num_slots) * words; i += kBuildThreads) {
    const int node = i / words, word = i % words;
    uint64_t bits = 0;
    for (int n = node < num_nodes ? node : -1; n >= word * 64; n = nodes.parent[n])
      if (n / 64 == word) bits |= uint64_t{1} << (n % 64);
    a.ancestor_bits[b * num_slots * num_words + i] = int64_t(bits);
  }
}

__global__ void __launch_bounds__(kBuildThreads, 1) tree_build_kernel(TreeBuildArgs a, int table_size) {
  extern __shared__ __align__(16) unsigned char memory[];
  BuildShared& shared = *reinterpret_cast<BuildShared*>(memory);
  wait_for_previous_kernel();
  allow_next_kernel();
  const int64_t b = blockIdx.x, num_candidates = a.max_depth * a.num_candidates;
  const int budget = a.budget[b];
  const Candidates candidates{a.log_probs + b * num_candidates, int(a.max_depth), int(a.num_candidates)};
  const int64_t* token_ids = a.token_ids + b * num_candidates;
  if (threadIdx.x == 0) {
    shared.nodes.cost[0] = 0.0;
    shared.nodes.parent[0] = -1;
    shared.nodes.rank[0] = shared.nodes.depth[0] = 0;
  }
  int status = kOk, num_nodes = 1;
  if (budget < 0 || budget > a.max_budget || a.bonus[b] < 0)
    status = kOutOfRange;
  else if (num_candidates > 0)
    num_nodes = budget > kSmallTree ? grow_large_tree(candidates, token_ids, shared, budget, table_size)
                                    : grow_small_tree(candidates, token_ids, shared, budget, table_size);
  if (status == kOk && num_nodes == 0) status = kInvalidCandidates;
  if (status != kOk) num_nodes = 0;
  __syncthreads();
  write_tree(a, shared.nodes, num_nodes);
  if (threadIdx.x > 0) return;
  a.num_nodes[b] = num_nodes;
  a.status[b] = status;
}

}  // namespace

int tree_build_cuda(const TreeBuildArgs& a, void* stream) {
  if (a.max_budget < 0 || a.max_budget > kMaxBudget || a.max_depth > 65535 || a.num_candidates > kMaxBuildCandidates)
    return kUnsupported;
  if (a.num_streams == 0) return kOk;
  int table_size = 2;
  while (table_size < 2 * a.num_candidates) table_size *= 2;
  return launch(tree_build_kernel, {dim3(a.num_streams), dim3(kBuildThreads), sizeof(BuildShared), 1, true}, stream, a,
                table_size);
}

}  // namespace kdtree
