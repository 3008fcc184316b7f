// The consumer warps of linear_tile.cuh: segment sums from the stages of the ring.
#pragma once
#include "int4_values.cuh"
#include "linear_shape.cuh"

namespace kdtree {

// Which of the block's segments, output tiles and row tiles a consumer warp has: the first of each.
template <class S>
struct WarpPlace {
  int segment, out_tile, row_tile;
  __device__ WarpPlace() {
    const int warp = threadIdx.x / kWarp;
    row_tile = warp % S::kRowWarps * S::kRowTiles;
    out_tile = warp / S::kRowWarps % S::kOutWarps * S::kOutTiles;
    segment = warp / (S::kRowWarps * S::kOutWarps);
  }
};

template <class S>
struct Accumulator {
  using T = typename S::T;
  float value[S::kOutTiles][S::kRowTiles][4];

  // The output (of 16) and the row (of 8) of element e of a lane.
  static __device__ int out(int lane, int e) { return sizeof(T) == 4 ? lane % 4 * 4 + e : lane / 4 + e / 2 * 8; }
  static __device__ int row(int lane, int e) { return sizeof(T) == 4 ? lane / 4 : lane % 4 * 2 + e % 2; }

  template <class F>
  __device__ __forceinline__ void each(F&& f) {
#pragma unroll
    for (int r = 0; r < S::kOutTiles; ++r)
#pragma unroll
      for (int j = 0; j < S::kRowTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) f(r, j, e, value[r][j][e]);
  }

  __device__ __forceinline__ void fill(float start) {
    each([start](int, int, int, float& v) { v = start; });
  }

  // Where a lane begins to read in a 16 x 32 block of weights, and in 8 rows of x: BF16, at a row of matrix lane / 8 of four.
  static __device__ uint32_t weight_offset(int lane) {
    if (S::kIsInt4) return lane * 8;
    return sizeof(T) == 4 ? lane % 4 * 16 : lane / 8 % 2 * 512 + lane / 16 * 128 + lane % 8 * 16;
  }
  static __device__ uint32_t x_offset(int lane) {
    return sizeof(T) == 4 ? lane / 4 * S::kRowBytes : row_chunk<T>(lane % 8, lane / 8);
  }

  // Adds one unit. `weights`: the warp's first 16 x 32 block, `x`: its first 8 rows, as shared addresses where the lane begins.
  __device__ __forceinline__ void add(uint32_t weights, uint32_t x, int lane) {
    if constexpr (S::kIsInt4) add_int4(weights, x, lane);
    else if constexpr (sizeof(T) == 2) add_bf16(weights, x);
    else add_f32(weights, x, lane / 4);
  }

  __device__ __forceinline__ void add_bf16(uint32_t weights, uint32_t x) {
    uint4 b[S::kRowTiles];
#pragma unroll
    for (int j = 0; j < S::kRowTiles; ++j) b[j] = load_matrices(x + j * kRowTile * S::kRowBytes);
#pragma unroll
    for (int r = 0; r < S::kOutTiles; ++r) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {  // 16 inputs each
        const uint4 a = load_matrices(weights + S::tile_offset(r) + h * 256);
#pragma unroll
        for (int j = 0; j < S::kRowTiles; ++j) mma_bf16(value[r][j], a, h ? b[j].z : b[j].x, h ? b[j].w : b[j].y);
      }
    }
  }

  // The same products in the same order, of values that become BF16 on the way.
  __device__ __forceinline__ void add_int4(uint32_t weights, uint32_t x, int lane) {
    uint4 b[S::kRowTiles];
#pragma unroll
    for (int j = 0; j < S::kRowTiles; ++j) b[j] = load_matrices(x + j * kRowTile * S::kRowBytes);
#pragma unroll
    for (int r = 0; r < S::kOutTiles; ++r) {
      const Int4Fragments a(weights + S::tile_offset(r), lane);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint4 matrix = a.get(h);
#pragma unroll
        for (int j = 0; j < S::kRowTiles; ++j) mma_bf16(value[r][j], matrix, h ? b[j].z : b[j].x, h ? b[j].w : b[j].y);
      }
    }
  }

  __device__ __forceinline__ void add_f32(uint32_t weights, uint32_t x, int row) {
#pragma unroll 2
    for (int c = 0; c < kUnit / 4; ++c) {
      uint4 b[S::kRowTiles];
#pragma unroll
      for (int j = 0; j < S::kRowTiles; ++j) b[j] = load_shared(x + j * kRowTile * S::kRowBytes + (c ^ row) * 16);
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int r = 0; r < S::kOutTiles; ++r) {
          const uint4 w = load_shared(weights + S::tile_offset(r) + (c * 4 + k) * (kOutTile * 4));
#pragma unroll
          for (int j = 0; j < S::kRowTiles; ++j) {
            const float v = __uint_as_float(k == 0 ? b[j].x : k == 1 ? b[j].y : k == 2 ? b[j].z : b[j].w);
            value[r][j][0] = fmaf(__uint_as_float(w.x), v, value[r][j][0]);
            value[r][j][1] = fmaf(__uint_as_float(w.y), v, value[r][j][1]);
            value[r][j][2] = fmaf(__uint_as_float(w.z), v, value[r][j][2]);
            value[r][j][3] = fmaf(__uint_as_float(w.w), v, value[r][j][3]);
          }
        }
    }
  }
};

// Segment sums that arrive one after the other, combined on the tree. The sums on hold are touched 14 times in a whole tile,
// so they lie in local memory (the index must stay a run-time value) and leave the registers to the accumulators.
template <class S>
struct Fold {
  float held[3][S::kOutTiles * S::kRowTiles * 4];  // by level

  __device__ __forceinline__ void take(int q, Accumulator<S>& acc) {
    int level = 0;
#pragma unroll 1
    for (; (q >> level) & 1; ++level)
      acc.each([&](int r, int j, int e, float& v) { v = held[level][(r * S::kRowTiles + j) * 4 + e] + v; });
    if (q == S::kSeq - 1) return;
    acc.each([&](int r, int j, int e, float& v) { held[level][(r * S::kRowTiles + j) * 4 + e] = v; });
  }
};

template <class S>
__device__ __forceinline__ void consume(const Tile<S>& tile, Accumulator<S>& acc, uint32_t full, uint32_t empty,
                                        uint32_t stages) {
  const int lane = threadIdx.x % kWarp;
  const WarpPlace<S> at_warp;
  const uint32_t weights = stages + at_warp.segment * S::kBlockTiles * S::kUnits * S::kUnitBytes +
                           S::tile_offset(at_warp.out_tile) + Accumulator<S>::weight_offset(lane);
  const uint32_t x = stages + S::kWeightBytes + Accumulator<S>::x_offset(lane) +
                     (at_warp.segment * S::kUnits * S::kBlockRows + at_warp.row_tile * kRowTile) * S::kRowBytes;
  constexpr int kUnroll = S::kMinBlocks > 1 && S::kOutTiles * S::kRowTiles >= 8 ? 1 : S::kUnits;  // or registers run out
  Fold<S> fold;
  Cursor<S> at;
#pragma unroll 1
  for (int q = 0; q < S::kSeq; ++q) {
    const Span span = tile.span(at_warp.segment, q);
    acc.fill(tile.mine(at_warp.segment, q) ? 0.f : -0.f);
    const int num_stages = S::kSeq > 1 && !tile.any_mine(q) ? 0 : tile.num_stages_per_segment;
    int left = span.end - span.begin;
#pragma unroll 1
    for (int i = 0; i < num_stages; ++i, left -= S::kUnits, at.next()) {
      barrier_wait(full + at.slot * 8, at.phase);
      const uint32_t offset = at.slot * S::kStageBytes;
      const auto add = [&](int u) {
        acc.add(weights + offset + u * S::kUnitStride, x + offset + u * S::kBlockRows * S::kRowBytes, lane);
      };
      if (left >= S::kUnits) {  // apart from the rest, so that the reads of a unit can overlap the sums of the one before
#pragma unroll kUnroll
        for (int u = 0; u < S::kUnits; ++u) add(u);
      } else if constexpr (S::kUnits == 2) {
        if (left == 1) add(0);
      } else {
#pragma unroll 1
        for (int u = 0; u < left; ++u) add(u);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(empty + at.slot * 8);
    }
    if constexpr (S::kSeq > 1) fold.take(q, acc);
  }
}

}  // namespace kdtree
