// block_attn in FP32 arithmetic, for every type and even head length. A warp computes the scores of 16 queries with 16 keys,
// a lane those of one key and every other query; then a lane owns every 32nd element of the results.
#pragma once
#include "block_attn_tile.cuh"

namespace kdtree {

template <class Element, int kColumns, int kMaxDim>
struct SimtWorker {
  using Float = Element;
  using Stored = float;
  using Memory = AttnMemory<Float, Stored>;

  static constexpr int kWidth = kColumns * kWarp;
  static constexpr int kPairs = kMaxDim / 2 / kHeadLanes;
  static constexpr int kStride = kTileRows + 4;  // of p in shared memory, [16 keys][kStride]
  static constexpr int kScratch = kTileKeys * kStride + kTileRows;
  static constexpr int kRows = kTileRows / 2;  // of a lane: 2 r + half

  static __host__ __device__ int query_stride(int dim) { return (dim + kChunk - 1) / kChunk * kChunk + 4; }

  const RowTile<Float>& tile;
  const Memory& memory;
  const int warp, lane, key, half;
  const float scale;
  float *p, *factor;
  float* largest;  // of the warp's 16 queries, in shared memory
  float sum[kRows], acc[kTileRows][kColumns];

  __device__ SimtWorker(const RowTile<Float>& t, const Memory& m, int w)
      : tile(t), memory(m), warp(w), lane(threadIdx.x % kWarp), key(lane % kTileKeys), half(lane / kTileKeys),
        scale(t.a.scale * kLog2E), p(m.scratch + w * kScratch), factor(p + kTileKeys * kStride),
        largest(m.largest + w * kTileRows) {
    if (lane < kTileRows) largest[lane] = -INFINITY;
    __syncwarp();
#pragma unroll
    for (int r = 0; r < kRows; ++r) sum[r] = 0.0f;
#pragma unroll
    for (int row = 0; row < kTileRows; ++row)
#pragma unroll
      for (int n = 0; n < kColumns; ++n) acc[row][n] = 0.0f;
  }

  __device__ void fetch(int) {}
  __device__ void load_queries() {}

  __device__ void add_keys(int first) {
    float score[kRows];
    add_scores(first + key, score);
    soften(first + key, score);
    __syncwarp();
    add_values(first);
    __syncwarp();
  }

  __device__ void add_scores(int position, float (&score)[kRows]) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) score[r] = 0.0f;
    if (!tile.holds(position)) return;
    const Float* from = tile.key(position, memory.own);
    const float* query = memory.query + half * query_stride(tile.dim);
#pragma unroll 1
    for (int e = 0; e < tile.dim; e += kChunk) {
      float v[kChunk];
      load_chunk(from + e, tile.dim - e, v);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float* q = query + 2 * r * query_stride(tile.dim) + e;
#pragma unroll
        for (int c = 0; c < kChunk; c += 4) {
          const float4 part = *reinterpret_cast<const float4*>(q + c);
          score[r] = __fmaf_rn(part.x, v[c], score[r]), score[r] = __fmaf_rn(part.y, v[c + 1], score[r]);
          score[r] = __fmaf_rn(part.z, v[c + 2], score[r]), score[r] = __fmaf_rn(part.w, v[c + 3], score[r]);
        }
      }
    }
  }

  // p of each query, and the factor that brings its sums to the new maximum, into shared memory.
  __device__ void soften(int position, const float (&score)[kRows]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = 2 * r + half;
      const int2 seen = memory.seen[row];
      const float s = position >= seen.x && position < seen.y ? __fmul_rn(score[r], scale) : -INFINITY;
      const float before = largest[row];
      float now = fmaxf(before, s);
#pragma unroll
      for (int offset = kTileKeys / 2; offset > 0; offset /= 2)
        now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, offset));
      const float base = now == -INFINITY ? 0.0f : now;
      const float weight = exp2_approx(s - base), keep = exp2_approx(before - base);
      sum[r] = __fmaf_rn(sum[r], keep, weight);
      p[key * kStride + row] = weight;
      __syncwarp();  // every lane has read the maximum before
      if (key == 0) largest[row] = now, factor[row] = keep;
    }
  }

  __device__ void add_values(int first) {
#pragma unroll
    for (int row = 0; row < kTileRows; ++row)
#pragma unroll
      for (int n = 0; n < kColumns; ++n) acc[row][n] = __fmul_rn(acc[row][n], factor[row]);
    for (int k = 0; k < kTileKeys; ++k) {
      if (!tile.holds(first + k)) continue;
      const Float* from = tile.value(first + k) + tile.column;
      float v[kColumns];
#pragma unroll
      for (int n = 0; n < kColumns; ++n) v[n] = n * kWarp + lane < tile.width ? to_float(from[n * kWarp + lane]) : 0.0f;
#pragma unroll
      for (int row = 0; row < kTileRows; row += 4) {
        const float4 weight = *reinterpret_cast<const float4*>(p + k * kStride + row);
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
          acc[row][n] = __fmaf_rn(weight.x, v[n], acc[row][n]);
          acc[row + 1][n] = __fmaf_rn(weight.y, v[n], acc[row + 1][n]);
          acc[row + 2][n] = __fmaf_rn(weight.z, v[n], acc[row + 2][n]);
          acc[row + 3][n] = __fmaf_rn(weight.w, v[n], acc[row + 3][n]);
        }
      }
    }
  }

  __device__ void store() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int offset = kTileKeys / 2; offset > 0; offset /= 2) sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], offset);
      if (key == 0) memory.sum[warp * kTileRows + 2 * r + half] = sum[r];
    }
#pragma unroll
    for (int row = 0; row < kTileRows; ++row)
#pragma unroll
      for (int n = 0; n < kColumns; ++n)
        if (n * kWarp + lane < tile.width) memory.acc[(warp * kTileRows + row) * tile.width + n * kWarp + lane] = acc[row][n];
  }
};

}  // namespace kdtree
