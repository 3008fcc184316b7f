// The second half of verify_attn: the leaves of a query, whose sums lie in the workspace, are folded. The order is fixed by
// the leaves' indices: sum j takes the leaves j, j + 8, …, then the 8 sums are added in order.
#pragma once
#include "verify_attn_plan.cuh"

namespace kdtree {

constexpr int kFoldThreads = 256, kFoldWarps = kFoldThreads / kWarp, kFoldSums = 8, kFoldColumns = 4 * kWarp;
constexpr int kFoldBlocks = 2;  // of a multiprocessor, at once

__device__ __forceinline__ void add_weighted(float4& acc, float weight, const float4& x) {
  acc.x = __fmaf_rn(weight, x.x, acc.x);
  acc.y = __fmaf_rn(weight, x.y, acc.y);
  acc.z = __fmaf_rn(weight, x.z, acc.z);
  acc.w = __fmaf_rn(weight, x.w, acc.w);
}
__device__ __forceinline__ void add_to(float4& acc, const float4& x) {
  acc.x = __fadd_rn(acc.x, x.x);
  acc.y = __fadd_rn(acc.y, x.y);
  acc.z = __fadd_rn(acc.z, x.z);
  acc.w = __fadd_rn(acc.w, x.w);
}

// Maximum over the leaves, and 1 / the sum over them of exp2(maximum - largest) * sum: lanes take leaves lane, lane +
// 32, …
struct QueryTotal {
  float largest, inverse_sum;
};

__device__ __forceinline__ QueryTotal total_of(const float2* stats, int num_leaves, int lane) {
  const float2 first = lane < num_leaves ? stats[lane] : make_float2(-INFINITY, 0.0f);
  float largest = first.x;
#pragma unroll 1
  for (int c = lane + kWarp; c < num_leaves; c += kWarp) largest = fmaxf(largest, stats[c].x);
  largest = warp_max(largest);
  float sum = lane < num_leaves ? __fmul_rn(exp2f(__fsub_rn(first.x, largest)), first.y) : 0.0f;
#pragma unroll 1
  for (int c = lane + kWarp; c < num_leaves; c += kWarp)
    sum = __fmaf_rn(exp2f(__fsub_rn(stats[c].x, largest)), stats[c].y, sum);
  return {largest, __fdiv_rn(1.0f, warp_sum(sum))};
}

template <class Float>
__device__ __forceinline__ void store_columns(Float* out, int count, const float4& acc, float scale) {
  const float v[4] = {acc.x, acc.y, acc.z, acc.w};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (i < count) out[i] = from_float<Float>(__fmul_rn(v[i], scale));
}

// Leaves of the query with most of them, at most; `prefix` is that of stream `lane`.
__device__ __forceinline__ int most_leaves(const VerifyAttnArgs& a, int lane, int prefix) {
#pragma unroll 1
  for (int s = lane + kWarp; s < int(a.num_streams); s += kWarp) prefix = max(prefix, a.prefix_len[s]);
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) prefix = max(prefix, __shfl_xor_sync(0xffffffffu, prefix, offset));
  return leaf_of(min(prefix, int(a.num_slots))) + 1;
}

// Up to 8 leaves of one lane's 4 columns: first, first + step, …; with kMaxima what their weights follow from, too.
template <bool kMaxima>
struct LeafColumns {
  float4 x[kFoldSums];
  float maximum[kFoldSums];

  __device__ __forceinline__ void load(const float* from, const float2* stats, int64_t leaf_stride, int num_leaves, int first,
                                       int step) {
#pragma unroll
    for (int j = 0; j < kFoldSums; ++j)
      if (first + j * step < num_leaves) {
        x[j] = __ldcs(reinterpret_cast<const float4*>(from + (first + j * step) * leaf_stride));
        if constexpr (kMaxima) maximum[j] = stats[first + j * step].x;
      }
  }
};

// 128 columns of a query: a warp's work, or a block's.
struct FoldPiece {
  int query, row, column;  // column: its first one

  __device__ __forceinline__ FoldPiece(const VerifyAttnArgs& a, int index) {
    const int slices = (int(a.latent_dim) + kFoldColumns - 1) / kFoldColumns;
    query = index / slices;
    column = index % slices * kFoldColumns;
    row = query / int(a.num_heads);
    asm volatile("" : "+r"(query), "+r"(row), "+r"(column));  // divided here, not where it is needed
  }
};

// kSplit: warp j of the block takes sum j.
template <class Float, bool kSplit>
__device__ __forceinline__ void fold_piece(const AttnLaunch& launch, const FoldPiece& piece, int num_leaves, int warp, int lane,
                                           float4 (*partial)[kWarp]) {
  constexpr int kStep = kSplit ? kFoldSums : 1, kSums = kSplit ? 1 : kFoldSums;
  const VerifyAttnArgs& a = launch.a;
  const int latent = int(a.latent_dim), first = kSplit ? warp : 0, column = piece.column + lane * 4;
  const int64_t leaf_stride = launch.num_queries * launch.pitch;
  const int num_used = column < latent ? num_leaves : 0;
  const float* from = launch.partials + int64_t(piece.query) * launch.pitch + column;
  const float2* stats = launch.stats + int64_t(piece.query) * launch.max_leaves;
  LeafColumns<kSplit> leaves;
  leaves.load(from, stats, leaf_stride, num_used, first, kStep);  // on their way while the maximum is found
  const QueryTotal total = total_of(stats, num_leaves, lane);
  float4 acc[kSums];
#pragma unroll
  for (auto& sum : acc) sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
  for (int begin = first; begin < num_used; begin += kFoldSums * kStep) {
    if (begin > first) leaves.load(from, stats, leaf_stride, num_used, begin, kStep);
#pragma unroll
    for (int j = 0; j < kFoldSums; ++j)
      if (begin + j * kStep < num_used)
        add_weighted(acc[kSplit ? 0 : j],
                     exp2f(__fsub_rn(kSplit ? leaves.maximum[j] : stats[begin + j].x, total.largest)), leaves.x[j]);
  }
  if constexpr (kSplit) {
    partial[warp][lane] = acc[0];
    __syncthreads();
#pragma unroll
    for (int j = 1; j < kFoldSums; ++j)
      if (warp == 0) add_to(acc[0], partial[j][lane]);
    __syncthreads();
    if (warp > 0) return;
  } else {
#pragma unroll
    for (int j = 1; j < kFoldSums; ++j) add_to(acc[0], acc[j]);
  }
  Float* out = static_cast<Float*>(a.out) + (launch.query_begin + piece.query) * latent + column;
  store_columns(out, latent - column, acc[0], num_leaves > 0 ? total.inverse_sum : NAN);
}

// Few rows have their own way: the number of leaves of the block's piece is asked for with all else that must be known.
template <class Float>
__global__ void __launch_bounds__(kFoldThreads, kFoldBlocks) attn_fold_kernel(const __grid_constant__ AttnLaunch launch) {
  __shared__ float4 partial[kFoldSums][kWarp];
  const VerifyAttnArgs& a = launch.a;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, blocks = int(gridDim.x);
  const int slices = (int(a.latent_dim) + kFoldColumns - 1) / kFoldColumns;
  const FoldPiece own(a, int(blockIdx.x));
  wait_for_previous_kernel();
  allow_next_kernel();
  const int num_leaves = launch.num_leaves[own.row];  // of every row of the launch, in use or not
  const int num_pieces = rows_in_use(a.num_rows_device, launch.num_rows, launch.row_begin) * int(a.num_heads) * slices;
  const int prefix = lane < a.num_streams ? a.prefix_len[lane] : 0;
  if (blockIdx.x == 0 && threadIdx.x == 0) *launch.tickets = 0;
  if (num_pieces <= blocks) {
    if (num_leaves != kUnusedRow) fold_piece<Float, true>(launch, own, num_leaves, warp, lane, partial);
    return;
  }
  const int most = most_leaves(a, lane, prefix);
  // rounds of loads, one after the other: for each piece, and for each 8 or 64 leaves
  const int alone = (num_pieces + blocks * kFoldWarps - 1) / (blocks * kFoldWarps) * (2 + most / 8);
  const int split = (num_pieces + blocks - 1) / blocks * (2 + most / 64);
  if (split < alone) {
#pragma unroll 1
    for (int i = blockIdx.x; i < num_pieces; i += blocks) {
      const FoldPiece piece(a, i);
      fold_piece<Float, true>(launch, piece, launch.num_leaves[piece.row], warp, lane, partial);
    }
  } else {
#pragma unroll 1
    for (int i = blockIdx.x * kFoldWarps + warp; i < num_pieces; i += blocks * kFoldWarps) {
      const FoldPiece piece(a, i);
      fold_piece<Float, false>(launch, piece, launch.num_leaves[piece.row], warp, lane, partial);
    }
  }
}

}  // namespace kdtree
