// The producer warps of linear_tile.cuh: one fills the ring of stages with weights, one with x.
#pragma once
#include "linear_shape.cuh"

namespace kdtree {

// --- weights ---------------------------------------------------------------------------------------------------------

// Asks for so many segments of a column into L2, in pieces: each is one request.
__device__ __forceinline__ void prefetch_segments(const TileArgs& a, const char* column, int unit_bytes, int segment, int count) {
  constexpr int kPiece = 16 * 1024;
  const int first = max(segment, a.first_segment), end = min(segment + count, a.end_segment);
  if (first >= end) return;
  const int64_t end_byte = int64_t(unit_bytes) * segment_span(end - 1, a.whole_units, a.first_segment, a.end_segment).end;
  int64_t at = int64_t(unit_bytes) * segment_span(first, a.whole_units, a.first_segment, a.end_segment).begin;
  for (; at < end_byte; at += kPiece) prefetch_to_l2(column + at, static_cast<int>(min(int64_t{kPiece}, end_byte - at)));
}

// The packed weights of the block's outputs: of each column a unit after the other.
template <class S>
struct BlockWeights {
  static constexpr int kColumnUnit = S::kColumnTiles * S::kUnitBytes;
  static constexpr int kPieces = (S::kBlockTiles + S::kColumnTiles - 2) / S::kColumnTiles + 1;  // columns of a ragged block
  const char* first;  // of the block's first tile; if it is ragged, of the column of that tile
  const char* first_up;  // of the ups of the block's first tile, where those are gates
  int64_t column_bytes;
  int last_column, last_up_column;
  int num_skipped;  // tiles of a ragged block's first column that are not the block's

  __device__ BlockWeights(const TileArgs& a, const Tile<S>& tile) {
    const int num_columns = (a.num_out + S::kColumnTiles * kOutTile - 1) / (S::kColumnTiles * kOutTile);
    const int column = tile.first_out_tile / S::kColumnTiles;
    column_bytes = static_cast<int64_t>(tile.num_units) * kColumnUnit;
    first = static_cast<const char*>(a.packed) + (static_cast<int64_t>(tile.group) * num_columns + column) * column_bytes;
    num_skipped = tile.first_out_tile % S::kColumnTiles;
    if constexpr (!S::kRagged) first += num_skipped * S::kUnitBytes;
    last_column = num_columns - 1 - column;
    if constexpr (S::kSwiglu) {
      const int up = tile.first_out_tile + a.num_out / (2 * kOutTile), between = up / S::kColumnTiles - column;
      first_up = first + between * column_bytes + (up % S::kColumnTiles - num_skipped) * S::kUnitBytes;
      last_up_column = last_column - between;
    }
  }

  // One unit of a ragged block: of each of its columns the tiles that are the block's.
  __device__ __forceinline__ void copy_ragged(uint32_t to, int unit, uint32_t barrier) const {
#pragma unroll
    for (int c = 0; c < kPieces; ++c) {
      const int begin = c == 0 ? 0 : c * S::kColumnTiles - num_skipped;  // of the block's tiles
      const int end = min((c + 1) * S::kColumnTiles - num_skipped, S::kBlockTiles);
      if (begin >= end) continue;
      const char* from = first + min(c, last_column) * column_bytes + unit * kColumnUnit;
      bulk_copy(to + begin * S::kUnitBytes, from + (c == 0 ? num_skipped : 0) * S::kUnitBytes, (end - begin) * S::kUnitBytes, barrier);
    }
  }

  // Units [unit, unit + num_units) of all tiles of the block, for one segment warp: of the `left` units of the segment those of
  // a stage. Past the last column: a harmless copy of it.
  __device__ __forceinline__ void copy(uint32_t to, int unit, int num_units, int left, uint32_t barrier) const {
    const uint32_t offset = unit * kColumnUnit;
    if constexpr (S::kRagged) {
#pragma unroll
      for (int u = 0; u < S::kUnits; ++u)
        if (u < left) copy_ragged(to + u * S::kUnitStride, unit + u, barrier);
    } else {
#pragma unroll
      for (int c = 0; c < S::kBlockTiles / S::kCopyTiles; ++c) {
        constexpr int kCopies = S::kRunTiles / S::kCopyTiles;
        const bool is_up = c >= kCopies;
        const int column = is_up ? min(c - kCopies, last_up_column) : min(c, last_column);
        const char* from = (is_up ? first_up : first) + column * column_bytes + offset;
        if constexpr (S::kCopyTiles == S::kColumnTiles) {
          bulk_copy(to + c * S::kUnits * S::kUnitStride, from, num_units * S::kUnitStride, barrier);
        } else {  // A part of one column. Not u < num_units: whether max(0, min(left, 2)) is 2, ptxas 13.0 asks on sm_90 a
                  // predicate of VIMNMX that says whether it is `left`, and three units were copied.
#pragma unroll
          for (int u = 0; u < S::kUnits; ++u)
            if (u < left) bulk_copy(to + u * S::kUnitStride, from + u * kColumnUnit, S::kUnitStride, barrier);
        }
      }
    }
  }
};

// One lane copies the units of every segment warp and output tile of a stage. What it copies must be what it announces: with a
// byte more the phase of the barrier ends too early, or never.
template <class S>
__device__ __forceinline__ void fill_weights(const Tile<S>& tile, const Cursor<S>& at, const BlockWeights<S>& weights,
                                             uint32_t full, uint32_t stages) {
  const uint32_t barrier = full + at.slot * 8, to = stages + at.slot * S::kStageBytes;
  int left[S::kSegWarps], num_units[S::kSegWarps], sum = 0;
#pragma unroll
  for (int s = 0; s < S::kSegWarps; ++s) {
    const Span span = tile.span(s, at.q);
    left[s] = span.end - span.begin - at.i * S::kUnits;
    num_units[s] = max(0, min(left[s], S::kUnits));
    sum += num_units[s];
  }
  barrier_arrive_expect(barrier, sum * S::kBlockTiles * S::kUnitBytes);
#pragma unroll
  for (int s = 0; s < S::kSegWarps; ++s) {
    if (num_units[s] == 0) continue;
    weights.copy(to + s * S::kBlockTiles * S::kUnits * S::kUnitBytes, tile.span(s, at.q).begin + at.i * S::kUnits, num_units[s],
                 left[s], barrier);
  }
}

// Asks for the weights that the block will copy, into L2. Before the previous kernel has ended: L2 is where all writes and reads
// of the GPU's memory meet, so that what comes there early is not old even if that kernel writes it later. A column is asked for
// by the block that has its first tile.
template <class S>
__device__ void prefetch_weights(const TileArgs& a, const Tile<S>& tile) {
  constexpr int kSegments = S::kSegWarps * S::kSeq;
  const BlockWeights<S> weights(a, tile);
  if (!elect_one()) return;
  const char* first = weights.first - (S::kRagged ? 0 : weights.num_skipped * S::kUnitBytes);
  const int num_columns = (weights.num_skipped + S::kBlockTiles + S::kColumnTiles - 1) / S::kColumnTiles;
  for (int c = weights.num_skipped > 0; c < min(num_columns, weights.last_column + 1); ++c)
    prefetch_segments(a, first + c * weights.column_bytes, weights.kColumnUnit, tile.rank * kSegments, kSegments);
}

template <class S>
__device__ void produce_weights(const TileArgs& a, const Tile<S>& tile, uint32_t full, uint32_t empty, uint32_t stages) {
  const BlockWeights<S> weights(a, tile);
  if (elect_one()) {
    int num_stages = 0;
    each_stage(tile, [&](const Cursor<S>& at) {
      barrier_wait(empty + at.slot * 8, at.phase ^ 1);  // the first round finds every slot free
      fill_weights<S>(tile, at, weights, full, stages);
      if (++num_stages == S::kStages) allow_next_kernel();
    });
    if (num_stages < S::kStages) allow_next_kernel();
  }
  __syncwarp();
}

// --- x ---------------------------------------------------------------------------------------------------------------

template <class S>
struct XProducer {
  using T = typename S::T;
  static constexpr int kChunk = 16 / sizeof(T), kChunks = kUnit / kChunk;  // elements of a copy; copies of a unit's row
  static constexpr int kRowsPerPass = kWarp / kChunks, kPasses = S::kBlockRows / kRowsPerPass;
  const TileArgs& a;
  const Tile<S>& tile;
  const uint32_t stages;
  const int c = threadIdx.x % kChunks, first_row = threadIdx.x % kWarp / kChunks;  // this lane's chunk and row of a pass
  const char* rows[kPasses];  // this lane's first chunk of each of its rows

  __device__ XProducer(const TileArgs& a, const Tile<S>& tile, uint32_t stages) : a(a), tile(tile), stages(stages) {
#pragma unroll
    for (int p = 0; p < kPasses; ++p)
      rows[p] = reinterpret_cast<const char*>(row(first_row + p * kRowsPerPass) + c * kChunk);
  }

  __device__ const T* row(int m) const {
    const T* x = static_cast<const T*>(a.x) + tile.group * (tile.rows ? 0 : a.x_group_stride);
    if (m >= tile.num_rows) return x;
    return x + (tile.rows ? tile.rows[m] / a.rows_per_source : tile.row_begin + m) * a.x_row_stride;
  }

  // Where this lane's chunk of row m of unit u of a segment warp lies.
  __device__ __forceinline__ uint32_t place(int slot, int seg_warp, int u, int m) const {
    return stages + slot * S::kStageBytes + S::kWeightBytes + (seg_warp * S::kUnits + u) * S::kBlockRows * S::kRowBytes +
           row_chunk<T>(m, c);
  }

  // Every segment warp with a segment of this rank has all units of the stage, none of them cut short by K.
  __device__ __forceinline__ bool is_whole(int i) const {
    return (i + 1) * S::kUnits <= tile.whole_units / kNumSegments - (a.num_in % kUnit != 0);
  }

  // kShare: some segments are other ranks'.
  template <bool kShare>
  __device__ __forceinline__ void fill_whole(const Cursor<S>& at) const {
    const int num_rows = tile.num_rows - first_row;  // rows past the last are left as they are: no sum of another row sees them
#pragma unroll
    for (int s = 0; s < S::kSegWarps; ++s) {
      if (kShare && !tile.mine(s, at.q)) continue;
      const uint32_t offset = (tile.span(s, at.q).begin + at.i * S::kUnits) * S::kRowBytes;
#pragma unroll
      for (int p = 0; p < kPasses; ++p)
        if (p * kRowsPerPass < num_rows)
#pragma unroll
          for (int u = 0; u < S::kUnits; ++u)
            cp_async16(place(at.slot, s, u, first_row + p * kRowsPerPass), rows[p] + offset + u * S::kRowBytes);
    }
  }

  // Any stage. `copies`: by 16-byte copies; else element by element with zeros past K, for any alignment and K.
  __device__ __forceinline__ void fill_part(const Cursor<S>& at, bool copies) const {
#pragma unroll 1
    for (int n = 0; n < S::kSegWarps * S::kUnits * kPasses; ++n) {
      const int s = n / (S::kUnits * kPasses), u = n / kPasses % S::kUnits, m = first_row + n % kPasses * kRowsPerPass;
      const Span span = tile.span(s, at.q);
      const int unit = span.begin + at.i * S::kUnits + u, k = unit * kUnit + c * kChunk;
      if (unit >= span.end || m >= tile.num_rows) continue;
      const T* x = row(m) + k;
      if (copies) {
        cp_async16(place(at.slot, s, u, m), x, k < a.num_in ? 16 : 0);
        continue;
      }
      union { T value[kChunk]; uint4 bits; } chunk;
#pragma unroll
      for (int e = 0; e < kChunk; ++e) chunk.value[e] = k + e < a.num_in ? x[e] : from_float<T>(0.f);
      store_shared(place(at.slot, s, u, m), chunk.bits);
    }
  }
};

template <class S>
__device__ void produce_x(const TileArgs& a, Tile<S>& tile, bool early, uint32_t full, uint32_t empty, uint32_t stages) {
  if (early) wait_for_previous_kernel(), tile.find_rows(a);
  const XProducer<S> producer(a, tile, stages);
  const bool copies = a.x_aligned && a.num_in % XProducer<S>::kChunk == 0;
  const bool is_share = tile.end_segment - tile.first_segment < kNumSegments;
  each_stage(tile, [&](const Cursor<S>& at) {
    barrier_wait(empty + at.slot * 8, at.phase ^ 1);
    if (a.x_aligned && producer.is_whole(at.i)) {
      if (is_share) producer.template fill_whole<true>(at);
      else producer.template fill_whole<false>(at);
      barrier_arrive_after_copies(full + at.slot * 8);
    } else {
      producer.fill_part(at, copies);
      if (copies) barrier_arrive_after_copies(full + at.slot * 8);
      else barrier_arrive(full + at.slot * 8);
    }
  });
}

}  // namespace kdtree
