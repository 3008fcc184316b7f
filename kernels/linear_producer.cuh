// The producer warp of linear_tile.cuh: fills a ring of stages with weights and x.
#pragma once
#include "linear_shape.cuh"

namespace kdtree {

template <class S>
struct Producer {
  using T = typename S::T;
  static constexpr int kChunk = 16 / sizeof(T), kChunks = kUnit / kChunk;  // elements of a copy; copies of a unit's row
  static constexpr int kRowsPerPass = kWarp / kChunks, kPasses = S::kBlockRows / kRowsPerPass;
  const TileArgs& a;
  const Tile<S>& tile;
  const uint32_t full, stages;  // shared addresses
  const int lane = threadIdx.x % kWarp;

  __device__ void weights(int slot, int q, int i) const {
    const uint32_t barrier = full + slot * 8;
    if (lane >= S::kSegWarps * S::kBlockTiles) return;
    const int num_tiles = (a.num_out + kOutTile - 1) / kOutTile;
    const int out_tile = min(tile.first_out_tile + lane % S::kBlockTiles, num_tiles - 1);  // past the end: a harmless copy
    const Span span = tile.span(lane / S::kBlockTiles, q);
    const int first = span.begin + i * S::kUnits, count = min(span.end - first, S::kUnits);
    if (count <= 0) return barrier_arrive(barrier);
    const int64_t unit = (static_cast<int64_t>(tile.group) * num_tiles + out_tile) * tile.num_units + first;
    barrier_arrive_expect(barrier, count * S::kUnitBytes);
    bulk_copy(stages + slot * S::kStageBytes + lane * S::kUnits * S::kUnitBytes,
              static_cast<const char*>(a.packed) + unit * S::kUnitBytes, count * S::kUnitBytes, barrier);
  }

  __device__ const T* row_pointer(int m) const {
    const T* x = static_cast<const T*>(a.x) + tile.group * (tile.rows ? 0 : a.x_group_stride);
    if (m >= tile.num_rows) return x;
    return x + (tile.rows ? tile.rows[m] / a.rows_per_source : tile.row_begin + m) * a.x_row_stride;
  }

  // Where row m, chunk c of unit u of a segment warp lies: in BF16 a lane's B fragments follow each other; in F32 chunks are
  // swizzled so that 8 rows are read without bank conflicts.
  __device__ uint32_t place(int slot, int seg_warp, int u, int m, int c) const {
    const int swizzled = sizeof(T) == 4 ? c ^ (m % 8) : c;
    return stages + slot * S::kStageBytes + S::kWeightBytes + ((seg_warp * S::kUnits + u) * S::kBlockRows + m) * S::kRowBytes +
           swizzled * 16;
  }

  __device__ void x_aligned(int slot, int q, int i, const T* const (&pointers)[kPasses]) const {
    const int c = lane % kChunks;
#pragma unroll
    for (int s = 0; s < S::kSegWarps; ++s) {
      const Span span = tile.span(s, q);
#pragma unroll
      for (int u = 0; u < S::kUnits; ++u) {
        const int unit = span.begin + i * S::kUnits + u, k = unit * kUnit + c * kChunk;
        if (unit >= span.end) break;
        const int num_bytes = max(0, min(kChunk, a.num_in - k)) * static_cast<int>(sizeof(T));
#pragma unroll
        for (int p = 0; p < kPasses; ++p) {
          const int m = lane / kChunks + p * kRowsPerPass;
          cp_async16(place(slot, s, u, m, c), pointers[p] + k, m < tile.num_rows ? num_bytes : 0);
        }
      }
    }
    barrier_arrive_after_copies(full + slot * 8);
  }

  __device__ void x_unaligned(int slot, int q, int i) const {  // rows that no 16-byte copy can read
    const int c = lane % kChunks;
#pragma unroll 1
    for (int s = 0; s < S::kSegWarps; ++s) {
      const Span span = tile.span(s, q);
#pragma unroll 1
      for (int j = 0; j < S::kUnits * kPasses; ++j) {
        const int m = lane / kChunks + j % kPasses * kRowsPerPass, unit = span.begin + i * S::kUnits + j / kPasses;
        if (unit >= span.end) break;
        const T* x = row_pointer(m);
        union { T value[kChunk]; uint4 bits; } chunk;
#pragma unroll
        for (int e = 0; e < kChunk; ++e) {
          const int k = unit * kUnit + c * kChunk + e;
          chunk.value[e] = m < tile.num_rows && k < a.num_in ? x[k] : from_float<T>(0.f);
        }
        store_shared(place(slot, s, j / kPasses, m, c), chunk.bits);
      }
    }
    barrier_arrive(full + slot * 8);
  }
};

template <class S>
__device__ void produce(const TileArgs& a, Tile<S>& tile, bool early, uint32_t full, uint32_t empty, uint32_t stages) {
  using P = Producer<S>;
  const P producer{a, tile, full, stages};
  const int per = tile.num_stages_per_segment, num_stages = per * S::kSeq, ahead = min(S::kStages, num_stages);
  if (early) {  // weights need not wait for the previous kernel
    for (int n = 0; n < ahead; ++n) producer.weights(n, n / per, n % per);
    wait_for_previous_kernel();
    tile.find_rows(a);
  }
  const typename S::T* pointers[P::kPasses];
#pragma unroll
  for (int p = 0; p < P::kPasses; ++p)
    pointers[p] = producer.row_pointer(producer.lane / P::kChunks + p * P::kRowsPerPass);
  int slot = 0, q = 0, i = 0;
  uint32_t phase = 1;  // of the empty barriers: the first round finds every slot free
  for (int n = 0; n < num_stages; ++n) {
    barrier_wait(empty + slot * 8, phase);
    if (!early || n >= ahead) producer.weights(slot, q, i);
    if (a.x_aligned) producer.x_aligned(slot, q, i, pointers);
    else producer.x_unaligned(slot, q, i);
    if (++slot == S::kStages) slot = 0, phase ^= 1;
    if (++i == per) i = 0, ++q;
  }
  allow_next_kernel();
}

}  // namespace kdtree
