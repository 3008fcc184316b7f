// How a reduction over K elements is cut, and in which order its pieces are added: the same for every tile shape, any
// number of threads and any number of rows, so that a row has the same bits whatever it is computed beside.
#pragma once
#include <algorithm>
#include <cstdint>

namespace kdtree {

constexpr int kNumSegments = 8;
constexpr int64_t kSegmentUnit = 32;
constexpr int kFoldLevels = 3;  // partial sums that wait while the 8 segment sums are added

// Segment s covers [bounds[s], bounds[s + 1]); some may be empty. Python: config.segment_bounds.
struct Segments {
  int64_t bounds[kNumSegments + 1];

  explicit Segments(int64_t length) {
    const int64_t num_units = (length + kSegmentUnit - 1) / kSegmentUnit;
    for (int64_t s = 0; s <= kNumSegments; ++s)
      bounds[s] = std::min(kSegmentUnit * (s * num_units / kNumSegments), length);
  }
};

// Adds segment sums that arrive in order 0 … 7 as ((0+1)+(2+3))+((4+5)+(6+7)), with at most kFoldLevels partial sums.
// `combine(level)` must do running = partial[level] + running, and `keep(level)` partial[level] = running, where
// `running` is the sum of the segment that has just arrived. After segment 7 it is the total.
template <class Combine, class Keep>
inline void fold_segment(int segment, Combine&& combine, Keep&& keep) {
  int level = 0;
  for (; (segment >> level) & 1; ++level) combine(level);
  if (segment != kNumSegments - 1) keep(level);
}

}  // namespace kdtree
