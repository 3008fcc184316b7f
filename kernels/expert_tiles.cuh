// The tile shapes of moe_experts that are not of INT4, and its two launches of products: those of the experts that were chosen,
// with that of the shared one beside them.
#pragma once
#include "expert_shares.h"
#include "linear_pair.cuh"

namespace kdtree {

// By rows of an item, or of the shared expert's tile; kPartials: segment sums. Beside8 is the shared expert's where it stands
// beside others: with segment sums in larger blocks, since there are enough. Share8 is for few segments: all warps have the same.
template <class T, bool kPartials>
struct ExpertTiles {
  using Rows8 = TileShape<T, 8, 1, 1, 1, 1, 2, 1, 1, 2, kPartials>;
  using Rows32 = TileShape<T, 8, 1, 1, 2, 4, 1, 1, 1, 2, kPartials>;
  using Rows64 = TileShape<T, 1, 4, 2, 2, 4, 2, kPartials ? 1 : 8, kPartials ? 8 : 1, 2, kPartials>;
  using Share8 = std::conditional_t<kPartials, TileShape<T, 1, 10, 1, 1, 1, 1, 1, 8, 2, true>, Rows8>;
  using Beside8 = std::conditional_t<kPartials, TileShape<T, 8, 1, 1, 4, 1, 1, 1, 1, 2, true>, Rows8>;
};

template <bool kPartials>
struct ExpertTiles<float, kPartials> {
  using Rows8 = TileShape<float, 8, 1, 1, 1, 1, 1, 1, 1, 2, kPartials>;
  using Rows32 = TileShape<float, 4, 2, 1, 1, 4, 1, kPartials ? 1 : 2, kPartials ? 2 : 1, 2, kPartials>;
  using Rows64 = Rows32;
  using Share8 = Rows8;
  using Beside8 = Rows8;
};

// The shared expert's where it stands beside experts of few segments, whose blocks have one segment each.
template <class T>
using BesideShare8 = TileShape<T, 1, 4, 1, 1, 1, 4, 1, 8, 4, true>;
template <class T>
using BesideShare32 = TileShape<T, 1, 4, 1, 1, 4, 2, 1, 8, 3, true>;

constexpr int64_t kMaxRowsBeside = 72;  // of the shared expert: a tree of 64 nodes has 65

inline bool has_few_segments(const TileArgs& t) { return t.end_segment - t.first_segment <= kFewSegments; }

template <class T, bool kPartials>
int run_expert_tile(const TileArgs& t, int rows_per_tile, void* stream) {
  using Tiles = ExpertTiles<T, kPartials>;
  if (rows_per_tile == 8 && kPartials && has_few_segments(t)) return launch_tile<typename Tiles::Share8>(t, 1, stream);
  if (rows_per_tile == 8) return launch_tile<typename Tiles::Rows8>(t, 1, stream);
  if (rows_per_tile == 32) return launch_tile<typename Tiles::Rows32>(t, 1, stream);
  return launch_tile<typename Tiles::Rows64>(t, 1, stream);
}

// With swiglu in the up products: the experts' of floats, and the shared one's. That is of few outputs, so blocks share a tile.
using SwigluRows8 = TileShape<__nv_bfloat16, 8, 1, 1, 2, 1, 1, 1, 1, 2, false, kFloats, true>;
using SwigluShared8 = TileShape<__nv_bfloat16, 2, 1, 1, 2, 1, 2, 1, 4, 2, false, kFloats, true>;
using SwigluShared32 = TileShape<__nv_bfloat16, 2, 1, 1, 2, 4, 2, 1, 4, 2, false, kFloats, true>;

// The shared expert's product, of at most kMaxRowsBeside rows, and those of the experts by shape S, of 8 rows.
template <class S>
int launch_beside(TileArgs shared, TileArgs experts, void* stream) {
  using Tiles = ExpertTiles<typename S::T, S::kPartials>;
  constexpr bool kIsShare = S::kPartials && S::kSegWarps == 1;
  using Few = std::conditional_t<kIsShare, BesideShare8<typename S::T>, typename Tiles::Beside8>;
  using More = std::conditional_t<kIsShare, BesideShare32<typename S::T>, typename Tiles::Rows32>;
  return shared.num_rows <= 8 ? launch_pair<Few, S>(shared, experts, stream) : launch_pair<More, S>(shared, experts, stream);
}

// The same for the up products where S has swiglu. The device has clusters.
template <class S>
int launch_swiglu_beside(TileArgs shared, TileArgs experts, void* stream) {
  if (shared.num_rows <= 8) return launch_pair<SwigluShared8, S>(shared, experts, stream);
  return launch_pair<SwigluShared32, S>(shared, experts, stream);
}

}  // namespace kdtree
