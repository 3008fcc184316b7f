// How a reduction over K elements is cut, and in which order its pieces are added: the same for every tile shape, any
// number of threads and any number of rows, so that a row has the same bits whatever it is computed beside.
#pragma once
#include <algorithm>
#include <cstdint>

namespace kdtree {

constexpr int kNumSegments = 8;
constexpr int64_t kSegmentUnit = 32;
constexpr int kFoldLevels = 3;  // partial sums that wait while the 8 segment sums are added

// Segment s covers [bounds[s], bounds[s + 1]); some may be empty, the last never is. Python: config.segment_bounds.
struct Segments {
  int64_t bounds[kNumSegments + 1];

  explicit Segments(int64_t length) {
    const int64_t num_units = (length + kSegmentUnit - 1) / kSegmentUnit;
    for (int64_t s = 0; s <= kNumSegments; ++s)
      bounds[s] = std::min(kSegmentUnit * (s * num_units / kNumSegments), length);
  }

  bool empty(int s) const { return bounds[s] == bounds[s + 1]; }

  bool any_empty() const {
    for (int s = 0; s < kNumSegments; ++s)
      if (empty(s)) return true;
    return false;
  }
};

// The tree ((0+1)+(2+3))+((4+5)+(6+7)) without its empty segments, for sums that arrive in order: num_folds[s] of those
// that wait, the latest first, are added to the sum of segment s. At most kFoldLevels wait. An empty segment's sum is
// +0, which only matters to a total of -0: the total with any segment empty must be added to +0.
struct SegmentTree {
  int num_folds[kNumSegments] = {};

  explicit SegmentTree(const Segments& segments) {
    const int64_t* bounds = segments.bounds;
    for (int s = 0; s < kNumSegments; ++s)
      for (int half = 1; half < kNumSegments; half *= 2) {
        const int begin = s / (2 * half) * (2 * half), middle = begin + half;
        if (bounds[s + 1] != bounds[begin + 2 * half]) break;  // more is to come on the right of s
        num_folds[s] += s >= middle && bounds[begin] != bounds[middle];
      }
  }
};

}  // namespace kdtree
