// Which work attend_few has (verify_attn_few.cuh): one stream's rows, few of them. Every warp finds the same plan by itself,
// and an item's number says all about it, so that blocks need neither tickets nor a word with each other. An item is up to
// 16 queries, the keys of a run of leaves (or of one row's tail), and a slice of the latent columns whose values it adds
// up: 512, 256 or 128. Its scores need all columns of the keys, so blocks that share keys score them again.
#pragma once
#include "verify_attn_begin.cuh"
#include "verify_attn_wgmma_group.cuh"

namespace kdtree {

constexpr int kLog2FewQueries = 4, kFewQueries = 1 << kLog2FewQueries, kFewSlices = 3;  // 1, 2 and 4 slices
constexpr int kFewTreeSlots = 128;  // larger trees take the other kernel

struct FewPlan {
  int num_rows, prefix, shared_end;  // prefix is -1 if it is not valid
  int num_heads, head_tiles, query_tiles;
  int log2_slices, log2_unit, num_runs;
  int num_tails, num_items;          // of each slice; of all
};

// What item `index` is: like an item of the other kernels, and which slice.
struct FewItem : AttnItem {
  int slice;
};

// The estimated time of all items with this run length and so many slices.
__device__ __forceinline__ float estimate_few(const FewPlan& plan, const FewCosts& costs, int log2_unit, int log2_slices,
                                              int num_blocks) {
  const int end = plan.shared_end, runs = num_runs(end, log2_unit);
  const int items = (plan.num_tails + plan.query_tiles * runs) << log2_slices;
  const int run_keys = end > 0 ? min(end, 1 << max(log2_unit, kLog2FirstLeaf + leaf_region(end - 1))) : 0;
  const int tail_tiles = plan.prefix >= 0 ? (plan.prefix - end) / kTileRows + 1 : 0;
  const float longest = float(max(run_keys / kTileRows, tail_tiles));
  const float tiles = (float(plan.num_tails) * float(tail_tiles) + float(plan.query_tiles) * float(end / kTileRows)) *
                      float(1 << log2_slices);
  const int rounds = (items + num_blocks - 1) / num_blocks;
  const float most = rounds <= 1 ? longest : fmaxf(longest, __fdividef(tiles, float(num_blocks)) + 0.5f * longest);
  const float per_tile = log2_slices == 0 ? costs.per_tile[0] : log2_slices == 1 ? costs.per_tile[1] : costs.per_tile[2];
  const float work = most * per_tile + float(rounds) * costs.per_item;
  return fmaxf(work, tiles * costs.per_load) + 0.125f * work;
}

// One warp: the plan, in every lane.
__device__ __forceinline__ FewPlan plan_few(const AttnLaunch& launch, const FewCosts& costs, OneStream one, int num_blocks,
                                            int lane) {
  FewPlan plan;
  plan.num_rows = one.num_rows;
  plan.prefix = one.prefix;
  plan.shared_end = one.prefix >= 0 ? leaf_begin(one.prefix) : 0;
  plan.num_heads = int(launch.a.num_heads);
  plan.head_tiles = ceil_shift(plan.num_heads, kLog2FewQueries);
  plan.query_tiles = ceil_shift(plan.num_rows * plan.num_heads, kLog2FewQueries);
  plan.num_tails = plan.num_rows * plan.head_tiles;
  uint32_t choice = 0xffffffffu;
  if (lane < kFewSlices * kNumLeafRegions) {
    const float time = estimate_few(plan, costs, kLog2FirstLeaf + lane / kFewSlices, lane % kFewSlices, num_blocks);
    choice = (__float_as_uint(time) & ~15u) | uint32_t(lane);  // both grow together
  }
  const int best = int(__reduce_min_sync(0xffffffffu, choice) & 15u);
  plan.log2_unit = kLog2FirstLeaf + best / kFewSlices;
  plan.log2_slices = best % kFewSlices;
  plan.num_runs = num_runs(plan.shared_end, plan.log2_unit);
  plan.num_items = (plan.num_tails + plan.query_tiles * plan.num_runs) << plan.log2_slices;
  return plan;
}

// What is looked up of a tail item, in shared memory.
struct FewTree {
  int depth[kFewTreeSlots], parent[kFewTreeSlots];
};

// All threads of the block, none of which still uses `tree` or `path`: the tail of one row's heads, without keys if the
// row is not valid. `path` becomes the node at each depth, unless the row's nodes are a chain.
__device__ __forceinline__ void find_few_tail(const AttnLaunch& launch, const FewPlan& plan, int index, FewTree& tree,
                                              uint8_t* path, FewItem& item) {
  const VerifyAttnArgs& a = launch.a;
  const int thread = int(threadIdx.x), row = index / plan.head_tiles, head = (index % plan.head_tiles) << kLog2FewQueries;
  const int stream = load_now(a.stream + launch.row_begin + row), node = load_now(a.node + launch.row_begin + row);
  if (thread < int(a.num_tree_slots)) {
    tree.depth[thread] = load_now(a.depth + thread);
    tree.parent[thread] = load_now(a.parent + thread);
  }
  __syncthreads();
  bool valid = stream == 0 && node >= 0 && node < int(a.num_tree_slots);
  valid = valid && plan.prefix >= 0 && plan.prefix + node < a.num_slots;
  const int depth = valid ? tree.depth[node] : -1;
  valid = valid && depth >= 0 && depth <= node;
  item.first_query = row * plan.num_heads + head;
  item.num_queries = min(kFewQueries, plan.num_heads - head);
  item.prefix = plan.prefix;
  item.begin = valid ? plan.shared_end : 0;
  item.end = valid ? plan.prefix + depth + 1 : 0;
  item.plain_end = depth == node ? item.end : item.prefix;  // only a chain is as deep as its index
  item.node = node;
  item.depth = depth;
  if (head == 0 && item.slice == 0 && thread == 0)
    launch.num_leaves[row] = valid ? leaf_of(item.end - 1) + 1 : kInvalidRow;
  if (!valid || depth == node) return;
  if (thread == 0) {
    int at = node;
#pragma unroll 1
    for (int k = depth; k >= 0; --k) {
      path[k] = uint8_t(at);
      at = tree.parent[at];
      at = at < 0 || at > node ? 0 : at;  // a broken tree may give wrong sums, not wrong addresses
    }
  }
  __syncthreads();
}

// All threads of the block: item `index`, which is below num_items, over a layer's cache.
__device__ __forceinline__ FewItem find_few(const AttnLaunch& launch, const FewPlan& plan, const void* cache, int index,
                                            FewTree& tree, uint8_t* path) {
  FewItem item;
  item.slice = index & ((1 << plan.log2_slices) - 1);
  item.stream = 0;
  item.keys = static_cast<const char*>(cache);
  item.log2_rows = kLog2FewQueries;
  index >>= plan.log2_slices;
  if (index < plan.num_tails) {
    find_few_tail(launch, plan, index, tree, path, item);
    return item;
  }
  index -= plan.num_tails;  // long runs first: they are the last ones of the prefix
  item.first_query = (index % plan.query_tiles) << kLog2FewQueries;
  item.num_queries = min(kFewQueries, plan.num_rows * plan.num_heads - item.first_query);
  find_run(plan.shared_end, plan.log2_unit, plan.num_runs - 1 - index / plan.query_tiles, item);
  item.prefix = item.plain_end = item.end;
  item.node = item.depth = -1;
  return item;
}

}  // namespace kdtree
