// How a reduction over K elements is cut, and in which order its pieces are added: the same for every tile shape, any
// number of threads and any number of rows, so that a row has the same bits whatever it is computed beside.
#pragma once
#include <algorithm>
#include <cstdint>

namespace kdtree {

constexpr int kNumSegments = 8;
constexpr int64_t kSegmentUnit = 32;
constexpr int kFoldLevels = 3;  // partial sums that wait while the 8 segment sums are added

// Segment s covers [segment_bound(length, s), segment_bound(length, s + 1)); some may be empty, the last never is. Python:
// config.segment_bounds.
inline int64_t segment_bound(int64_t length, int64_t s) {
  const int64_t num_units = (length + kSegmentUnit - 1) / kSegmentUnit;
  return std::min(kSegmentUnit * (s * num_units / kNumSegments), length);
}

// Neighbouring segments of a reduction over `whole` elements, `first` … first + count - 1: what one of several ranks
// sums. count is a power of two and first a multiple of it, so that their sum is a node of the tree. Count 0: no share is
// meant, but a whole reduction.
struct SegmentShare {
  int64_t whole;
  int first, count;

  int64_t begin() const { return segment_bound(whole, first); }
  int64_t length() const { return segment_bound(whole, first + count) - begin(); }

  // Whether it can be: then its length is `num_in`.
  bool fits(int64_t num_in) const {
    if (count == 0) return true;
    const bool is_node = count > 0 && (count & (count - 1)) == 0 && first >= 0 && first % count == 0;
    return is_node && first + count <= kNumSegments && whole >= 0 && length() == num_in;
  }
};

// Where the segments of a reduction begin and end, in bounds. Of a share the segments of other ranks are empty, and bounds
// count from the share's first element.
struct Segments {
  int64_t bounds[kNumSegments + 1];
  int first = 0, end = kNumSegments;  // those that are summed here

  explicit Segments(int64_t length) : Segments(SegmentShare{length, 0, kNumSegments}) {}

  Segments(int64_t length, const SegmentShare& share)
      : Segments(share.count ? share : SegmentShare{length, 0, kNumSegments}) {}

  explicit Segments(const SegmentShare& share) : first(share.first), end(share.first + share.count) {
    for (int s = 0; s <= kNumSegments; ++s)
      bounds[s] = segment_bound(share.whole, std::clamp(s, first, end)) - share.begin();
  }

  bool mine(int s) const { return s >= first && s < end; }
  bool empty(int s) const { return bounds[s] == bounds[s + 1]; }

  bool any_empty() const {
    for (int s = first; s < end; ++s)
      if (empty(s)) return true;
    return false;
  }

  // The first that is summed here and not empty; `end` where there is none.
  int first_in_use() const {
    int s = first;
    while (s < end && empty(s)) ++s;
    return s;
  }

  // The last that is not empty; -1 where there is none.
  int last() const {
    int s = end - 1;
    while (s >= first && empty(s)) --s;
    return s < first ? -1 : s;
  }
};

// The tree ((0+1)+(2+3))+((4+5)+(6+7)) without its empty segments, for sums that arrive in order: num_folds[s] of those
// that wait, the latest first, are added to the sum of segment s. At most kFoldLevels wait. An empty segment's sum is
// +0, which only matters to a total of -0: the total with any segment empty must be added to +0. The sum of a share has
// none of the other ranks' segments, not even as +0.
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
