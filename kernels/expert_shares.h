// A rank's share of every expert's width in moe_experts: what both devices ask of it.
#pragma once
#include "op_args.h"
#include "segments.h"

namespace kdtree {

constexpr int kFewSegments = 2;  // of a down product: a warp for each of eight would leave most idle

// The segments of a down product of the experts, or of the shared one, that are summed here.
inline Segments down_segments(const MoeExpertsArgs& a, bool is_shared) {
  const SegmentShare share{is_shared ? a.whole_shared_width : a.whole_width, a.first_segment, a.num_segments};
  return {is_shared ? a.shared_width : a.width, share};
}

// Whole experts, or the same segments of the routed experts' width and of the shared one's, without a residual.
inline bool shares_fit(const MoeExpertsArgs& a) {
  if (a.num_segments == 0) return true;
  const SegmentShare routed{a.whole_width, a.first_segment, a.num_segments};
  const SegmentShare shared{a.whole_shared_width, a.first_segment, a.num_segments};
  return a.residual == nullptr && routed.fits(a.width) && shared.fits(a.shared_width);
}

}  // namespace kdtree
