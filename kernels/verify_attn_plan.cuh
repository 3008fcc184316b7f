// Which work verify_attn has, found on the device: prefix lengths and row counts are known only there. An item is the
// keys [begin, end) for up to 64 queries (a query is one head of one row; they are counted row * H + head):
//   a tail item   one row's heads over its boundary leaf: the end of the prefix, then the path from the root to its node
//   a shared item queries of one stream over whole leaves of the prefix
// Each block makes the same plan and takes items by ticket, long ones first. How items are formed never touches the
// bits.
#pragma once
#include "attn_leaves.h"
#include "cuda_common.cuh"
#include "tree_walk.h"

namespace kdtree {

constexpr int kMaxAttnStreams = 64, kMaxPath = int(kMaxBudget) + 1;
constexpr int kInvalidRow = -1, kUnusedRow = -2;  // becomes NaN; is not in use, and is left alone
constexpr uint64_t kTicketMark = uint64_t{0x7bd1f5a3} << 32;

// One launch: the rows [row_begin, row_begin + num_rows) of the step, whose partial results fit the workspace.
struct AttnLaunch {
  VerifyAttnArgs a;
  int64_t row_begin, num_rows;
  int64_t query_begin, num_queries;  // the same in queries
  uint64_t* tickets;      // upper half: a mark that the count in the lower half is this launch's
  int32_t* num_leaves;    // [num_rows], or kInvalidRow or kUnusedRow
  float2* stats;          // [num_rows * H, max_leaves]: maximum (of log2), sum
  float* partials;        // [max_leaves, num_rows * H, pitch]
  int64_t max_leaves, pitch;
  float scale_log2;       // scale / ln 2
};

// Microseconds of one H200 multiprocessor, roughly; they only choose between equal results.
struct AttnCosts {
  float per_key[3], per_leaf[3], per_item[3];  // for 16, 32, 64 queries
  int min_log2_rows, max_log2_rows;            // query tiles that the kernel has
};

// What touches the time of the kernels with tensor cores, never the bits.
struct AttnTuning {
  AttnCosts mma, wgmma;
  int max_blocks;
  bool uses_wgmma;  // on Hopper
};
// On Hopper an item's start is hidden behind the item before it: it costs nothing, and short runs keep the blocks even.
constexpr AttnTuning kAttnTuning{{{0.038f, 0.054f, 0.062f}, {0.4f, 0.8f, 1.5f}, {3.0f, 4.5f, 5.5f}, 4, 6},
                                 {{0, 0, 0.028f}, {0, 0, 2.5f}, {0, 0, 0.0f}, 6, 6},
                                 1 << 30, true};

struct AttnItem {
  const char* keys;       // the stream's cache
  int begin, end;         // positions; begin is the first of a leaf
  int prefix, plain_end;  // positions from `prefix` on lie on the path; before plain_end slot and position are the same
  int stream, first_query, num_queries, log2_rows;
  int node, depth;        // of a tail item, else -1
};

struct AttnPlan {
  struct Stream {
    int row_begin, num_rows, prefix;  // prefix is -1 if it is not valid
    int shared_end;                   // first position of the boundary leaf
    int items_end;                    // shared items of the streams up to here
  } streams[kMaxAttnStreams];
  int num_rows, num_tail_items, num_items, tail_log2_rows, shared_log2_rows, log2_unit;
  int ordered;                        // rows lie as tree_rows makes them
};

__device__ __forceinline__ int ceil_shift(int x, int shift) { return (x + (1 << shift) - 1) >> shift; }

// The positions before `end` (the first of a leaf) in runs of 2^log2_unit positions, or of one leaf where leaves are
// longer.
__device__ __forceinline__ int num_runs(int end, int log2_unit) {
  int runs = 0;
#pragma unroll
  for (int r = 0; r < kNumLeafRegions; ++r) {
    const int begin = leaf_region_begin(r), last = r + 1 < kNumLeafRegions ? min(end, leaf_region_begin(r + 1)) : end;
    if (last > begin) runs += ceil_shift(last - begin, max(log2_unit, kLog2FirstLeaf + r));
  }
  return runs;
}

// The estimated time of all items with query tiles of 2^log2_rows and runs of 2^log2_unit for the shared ones: the
// blocks' work, and the partial results' way to memory and back.
__device__ float estimate(const AttnLaunch& launch, const AttnPlan& plan, const AttnCosts& costs, int log2_rows,
                          int log2_unit) {
  constexpr float kCacheBytes = 40e6f, kCacheRate = 8e6f, kMemoryRate = 3e6f;  // bytes, bytes per microsecond
  const int c = log2_rows - 4, tail = plan.tail_log2_rows - 4, num_heads = int(launch.a.num_heads);
  int items = plan.num_tail_items;
  const float tail_time = costs.per_item[tail] + 32.0f * costs.per_key[tail];
  float total = float(items) * tail_time, longest = tail_time, partials = 0.0f;
  for (int s = 0; s < int(launch.a.num_streams); ++s) {
    const AttnPlan::Stream& stream = plan.streams[s];
    if (stream.num_rows == 0 || stream.shared_end <= 0) continue;
    const int queries = stream.num_rows * num_heads, tiles = ceil_shift(queries, log2_rows), end = stream.shared_end;
    const int runs = num_runs(end, log2_unit), leaves = leaf_of(end - 1) + 1;
    const int run_keys = min(end, 1 << max(log2_unit, kLog2FirstLeaf + leaf_region(end - 1)));
    total += float(tiles) *
             (float(end) * costs.per_key[c] + float(leaves) * costs.per_leaf[c] + float(runs) * costs.per_item[c]);
    longest = fmaxf(longest, float(run_keys) * costs.per_key[c] + costs.per_leaf[c] + costs.per_item[c]);
    items += tiles * runs;
    partials += float(queries * leaves) * float(launch.pitch) * 8.0f;  // written and read
  }
  const float blocks = float(gridDim.x);
  const float work = float(items) <= blocks ? longest : fmaxf(longest, __fdividef(total, blocks) + 0.5f * longest);
  return work + __fdividef(partials, partials > 2.0f * kCacheBytes ? kMemoryRate : kCacheRate);
}

// One warp: whether there is a block for every item when tiles and runs are as small as can be. Then nothing else is as
// fast.
__device__ __forceinline__ bool shortest_runs_fit(const AttnLaunch& launch, const AttnPlan& plan, int log2_rows, int lane) {
  int items = 0;
  for (int s = lane; s < int(launch.a.num_streams); s += kWarp) {
    const AttnPlan::Stream& stream = plan.streams[s];
    if (stream.num_rows > 0 && stream.shared_end > 0)
      items += ceil_shift(stream.num_rows * int(launch.a.num_heads), log2_rows) * (leaf_of(stream.shared_end - 1) + 1);
  }
  return __reduce_add_sync(0xffffffffu, items) + plan.num_tail_items <= int(gridDim.x);
}

// One warp: the choice that is estimated fastest; choice k is the query tile k % sizes and the run length k / sizes.
__device__ int fastest_choice(const AttnLaunch& launch, const AttnPlan& plan, const AttnCosts& costs, int sizes, int lane) {
  const int log2_rows = costs.min_log2_rows + lane % sizes, log2_unit = kLog2FirstLeaf + lane / sizes;
  float best_time = INFINITY;
  if (lane < sizes * kNumLeafRegions) best_time = estimate(launch, plan, costs, log2_rows, log2_unit);
  int best = lane;
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const float time = __shfl_xor_sync(0xffffffffu, best_time, offset);
    const int other = __shfl_xor_sync(0xffffffffu, best, offset);
    if (time < best_time || (time == best_time && other < best)) best_time = time, best = other;
  }
  return best;
}

// One warp: the query tile and the run length that are estimated fastest, then the items of each stream.
__device__ void choose_tiles(const AttnLaunch& launch, AttnPlan& plan, const AttnCosts& costs, int lane) {
  const int num_streams = int(launch.a.num_streams), num_heads = int(launch.a.num_heads);
  int tail = costs.min_log2_rows;  // few rows: short items; many rows: the tile that fits the heads
  if (plan.num_rows * ceil_shift(num_heads, tail) > int(gridDim.x) / 2)
    while (tail < costs.max_log2_rows && (1 << tail) < num_heads) ++tail;
  if (lane == 0) {
    plan.tail_log2_rows = tail;
    plan.num_tail_items = plan.num_rows * ceil_shift(num_heads, tail);
  }
  __syncwarp();
  const int sizes = costs.max_log2_rows - costs.min_log2_rows + 1;
  const bool is_clear = shortest_runs_fit(launch, plan, costs.min_log2_rows, lane);
  const int best = is_clear ? 0 : fastest_choice(launch, plan, costs, sizes, lane);
  const int shared_log2_rows = costs.min_log2_rows + best % sizes, shared_log2_unit = kLog2FirstLeaf + best / sizes;
  int items = 0;
  for (int first = 0; first < num_streams; first += kWarp) {
    const int s = first + lane;
    const bool shares = s < num_streams && plan.streams[s].num_rows > 0 && plan.streams[s].shared_end > 0;
    int sum = shares ? ceil_shift(plan.streams[s].num_rows * num_heads, shared_log2_rows) *
                           num_runs(plan.streams[s].shared_end, shared_log2_unit)
                     : 0;
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, sum, offset);
      if (lane >= offset) sum += other;
    }
    if (s < num_streams) plan.streams[s].items_end = items + sum;
    items += __shfl_sync(0xffffffffu, sum, kWarp - 1);
  }
  if (lane > 0) return;
  plan.shared_log2_rows = shared_log2_rows;
  plan.log2_unit = shared_log2_unit;
  plan.num_items = plan.num_tail_items + items;
}

// All threads of the block. What comes last is one warp's: the others must meet it.
__device__ void plan_streams(const AttnLaunch& launch, const AttnCosts& costs, AttnPlan& plan) {
  const VerifyAttnArgs& a = launch.a;
  const int num_streams = int(a.num_streams), thread = int(threadIdx.x), step = int(blockDim.x);
  const int32_t* row_stream = a.stream + launch.row_begin;
  const auto stream_at = [&](int t, int num_rows) { return t >= 0 && t < num_rows ? row_stream[t] : -1; };
  const int num_rows = rows_in_use(a.num_rows_device, launch.num_rows, launch.row_begin);
  const int allocated = int(launch.num_rows);  // what is loaded first must not wait for the row count
  int s = stream_at(thread, allocated), before = stream_at(thread - 1, allocated);
  int behind = stream_at(thread + 1, allocated);
  if (thread == 0) plan.num_rows = num_rows;
#pragma unroll 1
  for (int i = thread; i < num_streams; i += step) {
    const int prefix = a.prefix_len[i];
    const bool valid = prefix >= 0 && prefix <= a.num_slots;
    plan.streams[i] = {0, 0, valid ? prefix : -1, valid ? leaf_begin(prefix) : 0, 0};
  }
  __syncthreads();
  bool ordered = true;
#pragma unroll 1
  for (int t = thread; t < num_rows; t += step) {
    if (t != thread) {
      s = stream_at(t, num_rows);
      before = stream_at(t - 1, num_rows);
      behind = stream_at(t + 1, num_rows);
    }
    const bool exists = s >= 0 && s < num_streams;
    ordered &= exists && s >= before;
    if (exists && s != before) plan.streams[s].row_begin = t;
    if (exists && (s != behind || t + 1 == num_rows)) plan.streams[s].num_rows = t + 1;  // its end, for now
  }
  ordered = __syncthreads_and(ordered);
#pragma unroll 1
  for (int i = thread; i < num_streams; i += step)
    plan.streams[i].num_rows = ordered ? plan.streams[i].num_rows - plan.streams[i].row_begin : 0;
  if (thread == 0) plan.ordered = ordered;
  __syncthreads();
  if (thread < kWarp) choose_tiles(launch, plan, costs, thread);
}

}  // namespace kdtree
