// The inner product of linear and moe_experts: a tile of rows times blocks of 16 packed outputs, one segment at a time.
#pragma once
#include "constant.h"
#include "segments.h"
#include "vec16.h"

namespace kdtree {

// Largest register tile, in rows and in blocks of 16 outputs: accumulators + one row of weights + a broadcast fit the
// vector registers. Tiles change the speed, never the bits.
#if defined(__AVX512F__)
constexpr int kTileRows = 6, kTileBlocks = 4;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int kTileRows = 3, kTileBlocks = 2;
#else
constexpr int kTileRows = 4, kTileBlocks = 1;
#endif

// For each segment of the reduction that is not empty calls sink(segment, acc) with acc[r][b] = sum over its k, in k
// order from +0, of x[r][k] * weight[b][k][lane]. `weight` is the first packed block; the next one lies num_in * 16
// elements on.
template <int kRows, int kBlocks, class Float, class Sink>
inline void tile_segments(const float* const* x, const Float* weight, int64_t num_in, const Segments& segments,
                          Sink&& sink) {
  const int64_t block_stride = num_in * kLanes;
  const float* row[kRows];
  for (int r = 0; r < kRows; ++r) row[r] = x[r];
#pragma GCC unroll 1
  for (int s = 0; s < kNumSegments; ++s) {
    if (segments.empty(s)) continue;
    Vec16 acc[kRows][kBlocks];
    for (int r = 0; r < kRows; ++r)
      for (int b = 0; b < kBlocks; ++b) acc[r][b] = Vec16::all(0.0f);
    const Float* w = weight + segments.bounds[s] * kLanes;
#pragma GCC unroll 2
    for (int64_t k = segments.bounds[s]; k < segments.bounds[s + 1]; ++k, w += kLanes) {
      Vec16 column[kBlocks];
      for (int b = 0; b < kBlocks; ++b) column[b] = Vec16::load(w + b * block_stride);
      for (int r = 0; r < kRows; ++r) {
        const Vec16 value = Vec16::all(row[r][k]);
        for (int b = 0; b < kBlocks; ++b) acc[r][b] = fma(value, column[b], acc[r][b]);
      }
    }
    sink(s, acc);
  }
}

// Calls emit(r, b, total) for each row and block of the tile: the segment sums, added as ((0+1)+(2+3))+((4+5)+(6+7)).
// Of a share their part of that tree. Never called where all segments are empty.
template <int kRows, int kBlocks, class Float, class Emit>
inline void tile_totals(const float* const* x, const Float* weight, int64_t num_in, const Segments& segments,
                        Emit&& emit) {
  Vec16 waiting[kFoldLevels][kRows][kBlocks];
  int num_waiting = 0;
  const SegmentTree tree(segments);
  const int last = segments.last();
  const Vec16 empty = Vec16::all(segments.any_empty() ? 0.0f : -0.0f);  // x + -0 = x
  tile_segments<kRows, kBlocks>(x, weight, num_in, segments, [&](int s, Vec16(&acc)[kRows][kBlocks]) {
    for (int i = 0; i < tree.num_folds[s]; ++i) {
      --num_waiting;
      for (int r = 0; r < kRows; ++r)
        for (int b = 0; b < kBlocks; ++b) acc[r][b] = waiting[num_waiting][r][b] + acc[r][b];
    }
    if (s != last) {
      for (int r = 0; r < kRows; ++r)
        for (int b = 0; b < kBlocks; ++b) waiting[num_waiting][r][b] = acc[r][b];
      ++num_waiting;
    } else {
      for (int r = 0; r < kRows; ++r)
        for (int b = 0; b < kBlocks; ++b) emit(r, b, acc[r][b] + empty);
    }
  });
}

// Cuts `count` rows into the fewest tiles of at most kTileRows, all of nearly the same height, and calls
// visit(first row, height) for each, the height a constant.
template <class Visit>
inline void for_row_tiles(int64_t count, Visit&& visit) {
  const int64_t num_tiles = (count + kTileRows - 1) / kTileRows;
  for (int64_t i = 0; i < num_tiles; ++i) {
    const int64_t begin = i * count / num_tiles, end = (i + 1) * count / num_tiles;
    with_constant<kTileRows>(int(end - begin), [&](auto height) { visit(begin, height); });
  }
}

// Neighbouring packed blocks that are computed together: kTileBlocks, 2 or 1.
struct Panel {
  int64_t block;
  int width;
};

inline int64_t num_panels_of(int64_t num_blocks) {
  const int64_t left = num_blocks % kTileBlocks;
  return num_blocks / kTileBlocks + left / 2 + left % 2;
}

// Panel i of num_panels_of(num_blocks), the widest first.
inline Panel panel_of(int64_t i, int64_t num_blocks) {
  const int64_t block = i * kTileBlocks, left = num_blocks - block;
  if (left >= kTileBlocks) return {block, kTileBlocks};
  return left >= 2 ? Panel{block, 2} : Panel{num_blocks - 1, 1};
}

template <class Visit>
inline void with_panel_width(int width, Visit&& visit) {
  if (width == kTileBlocks) return visit(std::integral_constant<int, kTileBlocks>());
  if constexpr (kTileBlocks > 2)
    if (width == 2) return visit(std::integral_constant<int, 2>());
  visit(std::integral_constant<int, 1>());
}

// Work of a product in the unit of parallel.h: a few rows cost no more than reading the weights.
inline int64_t product_work(int64_t num_rows, int64_t num_weights) { return (num_rows + 3) / 4 * num_weights; }

inline int64_t num_blocks_of(int64_t num_out) { return (num_out + kLanes - 1) / kLanes; }

}  // namespace kdtree
