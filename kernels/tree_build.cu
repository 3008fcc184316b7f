// The heaviest prefixes of per-depth marginals, best first. One block a stream: it checks the candidates, grows the tree and
// writes it. Up to 64 nodes are taken one after the other by a warp; larger trees grow level by level, and one after the
// other where the costs have so many ties that the level-wise bounds do not hold.
#include "tree_build_heap.cuh"
#include "tree_build_levels.cuh"

namespace kdtree {
namespace {

constexpr int64_t kMaxBuildCandidates = 4096;  // K
constexpr int kMaxSmallRows = kSmallTree + 2;

// Shared memory of the kernel: what is needed one after the other shares a place.
union Scratch {
  int tables[kMaxNodes * 18];
  Levels levels;
  struct {
    Heap heap;
    double steps[kMaxSmallRows * kSmallColumns];
  } small;
  __device__ Scratch() {}
};

struct BuildShared {
  Nodes nodes;
  Scratch scratch;
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

// Each row must fall from at most 0, and hold no NaN, no negative id and no id twice. All threads.
__device__ bool candidates_are_valid(const Candidates& candidates, const int64_t* token_ids, int* tables, int table_size) {
  const int num_candidates = candidates.num_candidates;
  bool valid = true;
  for (int i = threadIdx.x; i < candidates.max_depth * num_candidates; i += kBuildThreads) {
    const float most = i % num_candidates == 0 ? 0.0f : candidates.log_probs[i - 1];
    valid &= candidates.log_probs[i] <= most && token_ids[i] >= 0;
  }
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int fitting = int(sizeof(Scratch::tables)) / int(sizeof(int)) / table_size;
  const int num_tables = min(fitting, kBuildThreads / kWarp);
  if (warp < num_tables)
    for (int row = warp; row < candidates.max_depth; row += num_tables)
      valid &= !has_repeats(token_ids + int64_t(row) * num_candidates, num_candidates, tables + warp * table_size, table_size,
                            lane);
  return __syncthreads_and(valid);
}

// All threads; the number of nodes, root included.
__device__ int grow(const Candidates& candidates, BuildShared& shared, int budget) {
  Nodes& nodes = shared.nodes;
  if (threadIdx.x == 0) {
    nodes.cost[0] = 0.0;
    nodes.parent[0] = -1;
    nodes.rank[0] = nodes.depth[0] = 0;
  }
  if (budget == 0) return 1;
  if (budget > kSmallTree) {
    const int num_nodes = LevelGrower(candidates, shared.scratch.levels, budget).grow(nodes);
    __syncthreads();
    if (num_nodes > 0) return num_nodes;
  } else {
    const int num_rows = min(candidates.max_depth, kSmallTree) + 2;
    for (int i = threadIdx.x; i < num_rows * kSmallColumns; i += kBuildThreads)
      shared.scratch.small.steps[i] = candidates.cost(i / kSmallColumns, i % kSmallColumns);
    __syncthreads();
  }
  if (threadIdx.x < kWarp) {
    const auto& small = shared.scratch.small;
    const int count = budget > kSmallTree ? grow_large(candidates, nodes, shared.scratch.small.heap, budget, threadIdx.x)
                                          : grow_small(small.steps, nodes, shared.scratch.small.heap, budget, threadIdx.x);
    if (threadIdx.x == 0) nodes.num_nodes = count;
  }
  __syncthreads();
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
  for (int i = threadIdx.x; i < num_slots * num_words; i += kBuildThreads) {
    const int node = int(i / num_words), word = int(i % num_words);
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
  int status = kOk, num_nodes = 0;
  if (budget < 0 || budget > a.max_budget || a.bonus[b] < 0)
    status = kOutOfRange;
  else if (!candidates_are_valid(candidates, a.token_ids + b * num_candidates, shared.scratch.tables, table_size))
    status = kInvalidCandidates;
  else
    num_nodes = grow(candidates, shared, num_candidates > 0 ? budget : 0);
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
