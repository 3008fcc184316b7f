// The heaviest prefixes of per-depth marginals, best first. One block a stream: it checks the candidates, grows the
// tree and writes it. Up to 64 nodes are taken by one warp, round by round; larger trees grow level by level, and one node
// after the other where the costs have so many ties that the level-wise bounds do not hold.
#include "tree_build_heap.cuh"
#include "tree_build_levels.cuh"
#include "tree_build_rounds.cuh"

namespace kdtree {
namespace {

constexpr int64_t kMaxBuildCandidates = 4096;  // K

// A tree that a warp grows while the others look for repeated ids.
struct SmallShared {
  SmallTree tree;
  int tables[kMaxNodes * 8];
};

// A larger tree. What is needed one after the other shares a place.
struct LargeShared {
  Nodes nodes;
  union {
    int tables[kMaxNodes * 18];
    Levels levels;
    Heap heap;
  };
  __device__ LargeShared() {}
};

// Of the kernel for all budgets.
union AnyShared {
  SmallShared small;
  LargeShared large;
  __device__ AnyShared() {}
};
static_assert(sizeof(AnyShared) <= kMaxSharedBytes);

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

// Whether each row falls from at most 0, without NaN, and no id is negative: the share of thread `first` of `num_threads`.
__device__ bool values_are_valid(const Candidates& candidates, const int64_t* token_ids, int first, int num_threads) {
  bool valid = true;
  for (int i = first; i < candidates.max_depth * candidates.num_candidates; i += num_threads) {
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
__device__ int grow_large(const Candidates& candidates, const int64_t* token_ids, LargeShared& shared, int budget,
                          int table_size) {
  Nodes& nodes = shared.nodes;
  if (candidates.max_depth * candidates.num_candidates == 0) return 1;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const bool repeats = rows_repeat(candidates, token_ids, shared.tables, table_size, warp, kBuildThreads / kWarp);
  if (__syncthreads_or(repeats || !values_are_valid(candidates, token_ids, threadIdx.x, kBuildThreads))) return 0;
  const int num_nodes = LevelGrower(candidates, shared.levels, budget).grow(nodes);
  if (num_nodes > 0) return num_nodes;
  __syncthreads();
  if (warp == 0) {
    const int count = grow_by_heap(candidates, nodes, shared.heap, budget, lane);
    if (lane == 0) nodes.num_nodes = count;
  }
  __syncthreads();
  return nodes.num_nodes;
}

// The same for a budget of at most 64: one warp grows while the others check the candidates.
__device__ int grow_small(const Candidates& candidates, const int64_t* token_ids, SmallShared& shared, int budget,
                          int table_size) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  shared.tree.load_steps(candidates);
  __syncthreads();
  bool is_bad = false;
  if (warp == 0) {
    shared.tree.grow(budget, lane);
  } else {
    is_bad = rows_repeat(candidates, token_ids, shared.tables, table_size, warp - 1, kBuildThreads / kWarp - 1);
    is_bad |= !values_are_valid(candidates, token_ids, threadIdx.x - kWarp, kBuildThreads - kWarp);
  }
  return __syncthreads_or(is_bad) ? 0 : shared.tree.sort(budget);
}

// --- write -------------------------------------------------------------------------------------------------------------

template <class Tree>
__device__ void write_tree(const TreeBuildArgs& a, int num_nodes, const Tree& tree) {
  const int64_t b = blockIdx.x, num_slots = a.max_budget + 1, num_words = num_bit_words(num_slots);
  const int64_t* token_ids = a.token_ids + b * a.max_depth * a.num_candidates;
  for (int i = threadIdx.x; i < num_slots; i += kBuildThreads) {
    const int64_t at = b * num_slots + i;
    const bool used = i < num_nodes;
    const Node node = used ? tree.node(i) : Node{kNeverTaken, -1, 0, -1};
    a.token[at] = !used ? -1 : i == 0 ? a.bonus[b] : token_ids[(node.depth - 1) * a.num_candidates + node.rank];
    a.parent[at] = node.parent;
    a.depth[at] = node.depth;
    a.log_prob[at] = node.cost == 0.0 ? 0.0 : -node.cost;
  }
  const int words = int(num_words);  // 32-bit: dividing 64-bit numbers is slow
  for (int i = threadIdx.x; i < int(num_slots) * words; i += kBuildThreads) {
    const int node = i / words, word = i % words;
    uint64_t bits = 0;
    for (int n = node < num_nodes ? node : -1; n >= word * 64; n = tree.node(n).parent)
      if (n / 64 == word) bits |= uint64_t{1} << (n % 64);
    a.ancestor_bits[b * num_slots * num_words + i] = int64_t(bits);
  }
}

// A stream's inputs; its status is kOk where a tree can be tried.
struct Stream {
  Candidates candidates;
  const int64_t* token_ids;
  int budget, status;

  __device__ explicit Stream(const TreeBuildArgs& a)
      : candidates{a.log_probs + blockIdx.x * a.max_depth * a.num_candidates, int(a.max_depth), int(a.num_candidates)},
        token_ids(a.token_ids + blockIdx.x * a.max_depth * a.num_candidates), budget(a.budget[blockIdx.x]),
        status(budget < 0 || budget > a.max_budget || a.bonus[blockIdx.x] < 0 ? kOutOfRange : kOk) {}
};

// Writes the tree, or one without nodes; num_nodes is 0 for candidates that are not valid.
template <class Tree>
__device__ void finish(const TreeBuildArgs& a, const Stream& stream, int num_nodes, const Tree& tree) {
  const int status = stream.status == kOk && num_nodes == 0 ? kInvalidCandidates : stream.status;
  if (status != kOk) num_nodes = 0;
  write_tree(a, num_nodes, tree);
  if (threadIdx.x > 0) return;
  a.num_nodes[blockIdx.x] = num_nodes;
  a.status[blockIdx.x] = status;
}

// max_budget <= 64
__global__ void __launch_bounds__(kBuildThreads, 1) tree_build_small_kernel(TreeBuildArgs a, int table_size) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<SmallShared*>(memory);
  wait_for_previous_kernel();
  allow_next_kernel();
  const Stream stream(a);
  const int budget = stream.status == kOk ? stream.budget : 0;
  const int num_nodes = grow_small(stream.candidates, stream.token_ids, shared, budget, table_size);
  finish(a, stream, num_nodes, shared.tree);
}

__global__ void __launch_bounds__(kBuildThreads, 1) tree_build_kernel(TreeBuildArgs a, int table_size) {
  extern __shared__ __align__(16) unsigned char memory[];
  AnyShared& shared = *reinterpret_cast<AnyShared*>(memory);
  wait_for_previous_kernel();
  allow_next_kernel();
  const Stream stream(a);
  const int budget = stream.status == kOk ? stream.budget : 0;
  if (budget <= kSmallTree) {
    const int num_nodes = grow_small(stream.candidates, stream.token_ids, shared.small, budget, table_size);
    finish(a, stream, num_nodes, shared.small.tree);
  } else {
    if (threadIdx.x == 0) shared.large.nodes.set_root();
    __syncthreads();
    const int num_nodes = grow_large(stream.candidates, stream.token_ids, shared.large, budget, table_size);
    __syncthreads();
    finish(a, stream, num_nodes, shared.large.nodes);
  }
}

}  // namespace

int tree_build_cuda(const TreeBuildArgs& a, void* stream) {
  if (a.max_budget < 0 || a.max_budget > kMaxBudget || a.max_depth > 65535 || a.num_candidates > kMaxBuildCandidates)
    return kUnsupported;
  if (a.num_streams == 0) return kOk;
  int table_size = 2;
  while (table_size < 2 * a.num_candidates) table_size *= 2;
  const bool is_small = a.max_budget <= kSmallTree;
  const size_t shared_bytes = is_small ? sizeof(SmallShared) : sizeof(AnyShared);
  return launch(is_small ? tree_build_small_kernel : tree_build_kernel,
                {dim3(a.num_streams), dim3(kBuildThreads), shared_bytes, 1, Start::kEarly}, stream, a, table_size);
}

}  // namespace kdtree
