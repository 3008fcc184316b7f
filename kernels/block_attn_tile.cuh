// What the kernels of block_attn share. A cluster of 8 blocks of 8 warps works on 16 queries: those of up to 16 / g tokens
// of a drafter's block, g heads each, that share one key-value head. Keys lie in tiles of 16, aligned to positions; tile k of
// those that the queries see goes to block k mod 8 of the cluster and there to warp k / 8 mod 8. A warp keeps (max, sum, sum
// of p * value) of its tiles in order; each block folds its warps, then the cluster its blocks. Of heads longer than 128 a
// cluster gives a part of the results. So the order of additions depends on prefix_len and the block's size alone.
#pragma once
#include <cooperative_groups.h>

#include "block_sees.h"
#include "cuda_rows.cuh"
#include "head_norm.cuh"
#include "mma_bf16.cuh"

namespace kdtree {

constexpr int kAttnThreads = 256, kAttnWarps = kAttnThreads / kWarp, kAttnCluster = 8;
constexpr int kAttnWorkers = kAttnWarps * kAttnCluster;
constexpr int kTileRows = 16, kTileKeys = 16;
constexpr int kFoldRows = kTileRows / kAttnCluster;  // that each block of the cluster folds
constexpr int kMaxWidth = 128;  // of the results of a cluster
constexpr float kLog2E = 1.4426950408889634f;

// One cluster's queries and the keys that they see together.
template <class Float>
struct RowTile {
  const BlockAttnArgs& a;
  int dim, groups, block, kv_head, first, count;  // queries first … first + count - 1 of g * b: token by token
  int64_t stream, prefix;
  int begin, end;  // positions of the keys
  int column, width;  // elements column … column + width - 1 of the results

  __device__ RowTile(const BlockAttnArgs& args, int max_width) : a(args), dim(int(args.dim)) {
    groups = int(a.num_heads / a.num_kv_heads);
    const int num_parts = (dim + max_width - 1) / max_width, head = blockIdx.z / num_parts;
    column = blockIdx.z % num_parts * max_width, width = min(max_width, dim - column);
    block = head / int(a.num_kv_heads), kv_head = head % int(a.num_kv_heads);
    first = blockIdx.y * kTileRows;
    count = min(kTileRows, groups * int(a.block_size) - first);
    stream = a.stream[block], prefix = a.prefix_len[block];
    const KeyRange seen = keys_seen(a, prefix, first / groups, (first + count - 1) / groups);
    begin = int(seen.begin), end = int(seen.end);
  }

  __device__ int token(int row) const { return (first + row) / groups; }

  // Head `head` of a token of the block, counted over queries, keys and values.
  __device__ const Float* head_of(int token, int64_t head) const {
    const int64_t heads = a.num_heads + 2 * a.num_kv_heads;
    return static_cast<const Float*>(a.qkv) + ((block * a.block_size + token) * heads + head) * dim;
  }
  __device__ const Float* query(int row) const {
    return head_of(token(row), int64_t(kv_head) * groups + (first + row) % groups);
  }
  // From element `column` on.
  __device__ Float* out(int row) const {
    const int64_t head = int64_t(kv_head) * groups + (first + row) % groups;
    return static_cast<Float*>(a.out) + ((block * a.block_size + token(row)) * a.num_heads + head) * dim + column;
  }

  // Key or value of a position: of the context, or of the block, whose own keys lie turned in shared memory.
  __device__ const Float* cached(const void* cache, int position) const {
    const int64_t slot = stream * a.num_slots + position;
    return static_cast<const Float*>(cache) + ((slot * a.num_layers + a.layer) * a.num_kv_heads + kv_head) * dim;
  }
  __device__ const Float* key(int position, const Float* own) const {
    return position < prefix ? cached(a.keys, position) : own + (position - int(prefix)) * dim;
  }
  __device__ const Float* value(int position) const {
    return position < prefix ? cached(a.values, position)
                             : head_of(position - int(prefix), a.num_heads + a.num_kv_heads + kv_head);
  }
  __device__ bool holds(int position) const { return position >= begin && position < end; }

  __device__ int first_tile() const { return begin / kTileKeys; }
  __device__ int num_tiles() const { return (end + kTileKeys - 1) / kTileKeys - first_tile(); }

  // Whether a tile of one of this block's warps reaches into the drafter's block.
  __device__ bool needs_own_keys(int rank) const {
    for (int k = max(0, int(prefix) / kTileKeys - first_tile()); k < num_tiles(); ++k)
      if (k % kAttnCluster == rank) return true;
    return false;
  }
};

// Shared memory of a block. `own` and `acc` lie in the same place, one after the other in time.
template <class Float, class Stored>
struct AttnMemory {
  Stored* query;     // [16][query_stride]
  Float* own;        // [b][dim] the block's own keys, turned
  float* acc;        // [8][16][width] by warp; folded, [16][width]
  float *largest, *sum;              // [8][16]
  float *block_largest, *block_sum;  // [16] of the whole block
  int2* seen;        // [16] positions that each query sees
  float* scratch;    // of each warp's own

  static __host__ __device__ size_t query_bytes(int query_stride) { return sizeof(Stored) * kTileRows * query_stride; }
  static __host__ __device__ size_t shared_part(int block_size, int dim) {
    const size_t own = (sizeof(Float) * block_size * dim + 15) / 16 * 16;
    const size_t acc = sizeof(float) * kAttnWarps * kTileRows * (dim < kMaxWidth ? dim : kMaxWidth);
    return own > acc ? own : acc;
  }
  static __host__ size_t bytes(int query_stride, int block_size, int dim, int scratch_floats) {
    const int floats = 2 * (kAttnWarps + 1) * kTileRows + 2 * kTileRows;
    return query_bytes(query_stride) + shared_part(block_size, dim) + sizeof(float) * (floats + kAttnWarps * scratch_floats);
  }

  __device__ AttnMemory(unsigned char* memory, int query_stride, int block_size, int dim) {
    query = reinterpret_cast<Stored*>(memory);
    memory += query_bytes(query_stride);
    own = reinterpret_cast<Float*>(memory), acc = reinterpret_cast<float*>(memory);
    largest = reinterpret_cast<float*>(memory + shared_part(block_size, dim));
    sum = largest + kAttnWarps * kTileRows;
    block_largest = sum + kAttnWarps * kTileRows;
    block_sum = block_largest + kTileRows;
    seen = reinterpret_cast<int2*>(block_sum + kTileRows);
    scratch = reinterpret_cast<float*>(seen + kTileRows);
  }
};

// Half of the lanes: queries, zeros past the last and past dim, and what they see. The others, where it is needed: the
// block's own keys.
template <int kPairs, class Float, class Stored>
__device__ void stage_heads(const RowTile<Float>& tile, const AttnMemory<Float, Stored>& memory, int query_stride, int rank) {
  constexpr int kAtOnce = kAttnThreads / kHeadLanes - kTileRows;
  const BlockAttnArgs& a = tile.a;
  const int lane = threadIdx.x % kHeadLanes, row = threadIdx.x / kHeadLanes;
  if (row < kTileRows) {  // whole warps
    Stored* query = memory.query + row * query_stride;
    const bool used = row < tile.count;
    const int64_t position = tile.prefix + (used ? tile.token(row) : 0);
    norm_and_turn<kPairs>(used ? tile.query(row) : nullptr, static_cast<const Float*>(a.query_norm), a.eps,
                          a.cos_sin + position * tile.dim, tile.dim, query);
    for (int i = (used ? tile.dim : 0) + lane; i < query_stride; i += kHeadLanes) query[i] = from_float<Stored>(0.0f);
    if (lane == 0) {
      const KeyRange seen = used ? keys_seen(a, tile.prefix, tile.token(row)) : KeyRange{0, 0};
      memory.seen[row] = {int(seen.begin), int(seen.end)};
    }
  } else if (tile.needs_own_keys(rank)) {
    for (int first = 0; first < a.block_size; first += kAtOnce) {
      const int i = first + row - kTileRows;
      norm_and_turn<kPairs>(i < a.block_size ? tile.head_of(i, a.num_heads + tile.kv_head) : nullptr,
                            static_cast<const Float*>(a.key_norm), a.eps, a.cos_sin + (tile.prefix + i) * tile.dim,
                            tile.dim, memory.own + i * tile.dim);
    }
  }
}

// Several (max, sum, value) of one row, brought to their common maximum and added in order.
template <int kCount>
struct Fold {
  float largest[kCount], sum[kCount], value[kCount], common = -INFINITY, total = 0.0f, mixed = 0.0f;

  __device__ void add() {
#pragma unroll
    for (int i = 0; i < kCount; ++i) common = fmaxf(common, largest[i]);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float weight = largest[i] == -INFINITY ? 0.0f : exp2_approx(largest[i] - common);
      total = __fmaf_rn(sum[i], weight, total);
      mixed = __fmaf_rn(value[i], weight, mixed);
    }
  }
};

// The results of a block's warps, into the place of the first one's.
template <class Float, class Stored>
__device__ void fold_warps(const RowTile<Float>& tile, const AttnMemory<Float, Stored>& memory) {
  for (int i = threadIdx.x; i < kTileRows * tile.width; i += kAttnThreads) {
    const int row = i / tile.width;
    Fold<kAttnWarps> fold;
#pragma unroll
    for (int w = 0; w < kAttnWarps; ++w) {
      fold.largest[w] = memory.largest[w * kTileRows + row], fold.sum[w] = memory.sum[w * kTileRows + row];
      fold.value[w] = memory.acc[w * kTileRows * tile.width + i];
    }
    fold.add();
    memory.acc[i] = fold.mixed;
    if (i == row * tile.width) memory.block_largest[row] = fold.common, memory.block_sum[row] = fold.total;
  }
}

// The results of the cluster's blocks: two rows of them in each.
template <class Float, class Stored>
__device__ void fold_blocks(const RowTile<Float>& tile, const AttnMemory<Float, Stored>& memory,
                            const cooperative_groups::cluster_group& cluster) {
  const int column = threadIdx.x % tile.width, row = int(cluster.block_rank()) * kFoldRows + threadIdx.x / tile.width;
  if (threadIdx.x >= kFoldRows * tile.width || row >= tile.count) return;
  Fold<kAttnCluster> fold;
#pragma unroll
  for (int b = 0; b < kAttnCluster; ++b) {
    fold.largest[b] = cluster.map_shared_rank(memory.block_largest, b)[row];
    fold.sum[b] = cluster.map_shared_rank(memory.block_sum, b)[row];
    fold.value[b] = cluster.map_shared_rank(memory.acc, b)[row * tile.width + column];
  }
  fold.add();
  tile.out(row)[column] = from_float<Float>(__fdiv_rn(fold.mixed, fold.total));
}

template <class Worker>
__global__ void __launch_bounds__(kAttnThreads, 1) block_attn_kernel(BlockAttnArgs a) {
  using Float = typename Worker::Float;
  extern __shared__ __align__(16) unsigned char bytes[];
  wait_for_previous_kernel();
  allow_next_kernel();
  const auto cluster = cooperative_groups::this_cluster();
  const int rank = int(cluster.block_rank()), warp = threadIdx.x / kWarp;
  const RowTile<Float> tile(a, Worker::kWidth);
  if (!block_is_valid(a, tile.stream, tile.prefix)) {  // all blocks of the cluster alike
    for (int row = rank; row < tile.count; row += kAttnCluster)
      poison_row(reinterpret_cast<char*>(tile.out(row)), tile.width * int64_t(sizeof(Float)));
    return;
  }
  const int query_stride = Worker::query_stride(tile.dim), num_tiles = tile.num_tiles();
  const AttnMemory<Float, typename Worker::Stored> memory(bytes, query_stride, int(a.block_size), tile.dim);
  Worker worker(tile, memory, warp);
  int k = warp * kAttnCluster + rank;
  worker.fetch((tile.first_tile() + k) * kTileKeys);
  stage_heads<Worker::kPairs>(tile, memory, query_stride, rank);
  __syncthreads();
  worker.load_queries();
  for (; k < num_tiles; k += kAttnWorkers) worker.add_keys((tile.first_tile() + k) * kTileKeys);
  __syncthreads();  // the block's own keys make room
  worker.store();
  __syncthreads();
  fold_warps(tile, memory);
  cluster.sync();
  fold_blocks(tile, memory, cluster);
  cluster.sync();  // a block's shared memory must outlive its readers
}

}  // namespace kdtree
