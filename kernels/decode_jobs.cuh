// Which weights each warp of decode_layers multiplies, and in which order: the same list for the ring that brings them and for
// the phases that use them.
//   by block    a tile of 16 outputs for each block in turn, a segment for each of its 8 warps
//   by segment  a segment of a tile for each warp
//   by halves   a tile for each two warps, four segments each
// Consecutive segments and tiles are in different blocks.
#pragma once
#include "decode_work.cuh"

namespace kdtree {

constexpr int kHalfSegments = kNumSegments / 2, kPairs = kDecodeWarps / 2, kRouterShift = kDecodeWarps / 2;
static_assert(kHalfSegments == kDownUnits && kHalfSegments == kFloatUnits);

struct Dealt {
  int block, num_blocks, warp;

  // The n-th segment of this warp. The phase before begins with the first warps, this one with others, whose rings then fill at
  // the same time.
  __device__ __forceinline__ int segment(int n) const {
    return (n * kDecodeWarps + (warp + kRouterShift) % kDecodeWarps) * num_blocks + block;
  }
  __device__ __forceinline__ int tile(int n) const { return n * num_blocks + block; }
  __device__ __forceinline__ int tile_of_two(int n) const { return (n * kPairs + warp / 2) * num_blocks + block; }
  __device__ __forceinline__ int half() const { return warp % 2; }
};

__device__ __forceinline__ constexpr DecodeSpan half_units(int num_units, int half) {
  return {half * num_units / 2, (half + 1) * num_units / 2};
}

class Pieces {
 public:
  int num_routed = 0;  // layers whose experts are known

  __device__ __forceinline__ Pieces(const DecodeArgs& k, const Chosen& chosen, Dealt at)
      : k_(k), chosen_(chosen), at_(at), phase_(k.a.first_phase) {}

  // The next piece of the job at hand; else the first one of the next.
  __device__ __forceinline__ Piece next(int lane) {
    Piece piece{};
    if (units_ == 0 && !find_job(lane)) return piece;
    if (map_ == nullptr) {
      const int units = min(units_, kFloatUnits);
      piece.num_bytes = units * kBf16UnitBytes, piece.from = from_;
      from_ += kFloatUnits * kBf16UnitBytes, units_ -= units;
      return piece;
    }
    // Boxes of gates and of ups, or one of each expert: units_ counts those of all.
    const int boxes = min(units_ / kBoxUnits, kBoxes);
    piece.num_bytes = boxes * kBoxBytes, piece.map = map_, piece.tile = tile_, piece.unit = unit_, piece.to = to_;
    piece.has_box = lane < kBoxes && (is_pair_ ? lane % 2 * 2 < boxes : lane < boxes);
    unit_ += kPairUnits, units_ -= boxes * kBoxUnits;
    return piece;
  }

 private:
  const DecodeArgs& k_;
  const Chosen& chosen_;
  const Dealt at_;
  int layer_ = 0, phase_, n_ = 0;
  static constexpr int kBoxes = kSlotBytes / kBoxBytes;
  int units_ = 0;                     // of the job at hand, that are left
  const char* from_ = nullptr;        // of BF16, the next piece
  const CUtensorMap* map_ = nullptr;  // of INT4; what this lane copies of the next piece
  int to_ = 0, tile_ = 0, unit_ = 0;
  bool is_pair_ = false;

  // The next job that has units.
  __device__ __forceinline__ bool find_job(int lane) {
#pragma unroll 1
    while (layer_ < k_.a.num_layers) {
      if (phase_ >= kUp && num_routed <= layer_) return false;
      const bool found = find(k_.layers[layer_], lane);
      ++n_;
      if (found && units_ > 0) return true;
      if (found) continue;
      n_ = 0;
      if (++phase_ >= k_.a.end_phase) phase_ = k_.a.first_phase, ++layer_;
    }
    return false;
  }

  __device__ __forceinline__ bool floats(const void* packed, int tile, int num_units, DecodeSpan span) {
    from_ = static_cast<const char*>(packed) + int64_t(tile * num_units + span.begin) * kBf16UnitBytes;
    units_ = span.size(), map_ = nullptr;
    return true;
  }

  __device__ __forceinline__ bool by_block(const void* packed, int num_tiles, int num_units) {
    const int tile = at_.tile(n_);
    return tile < num_tiles && floats(packed, tile, num_units, segment_units(num_units, at_.warp));
  }
  __device__ __forceinline__ bool by_halves(const void* packed, int num_tiles, int num_units) {
    const int tile = at_.tile_of_two(n_);
    return tile < num_tiles && floats(packed, tile, num_units, half_units(num_units, at_.half()));
  }

  __device__ __forceinline__ bool router(const DecodeLayer& w) {
    const int place = at_.segment(n_), tile = place / kNumSegments;
    if (tile >= kAllRouterTiles) return false;
    const bool is_shared = tile >= kRouterTiles;
    return floats(is_shared ? w.shared_gate_up : w.router, is_shared ? tile - kRouterTiles : tile, units_of(Dims::kDim),
                  segment_units(units_of(Dims::kDim), place % kNumSegments));
  }

  // The first of a lane's units, of INT4 weights.
  __device__ __forceinline__ void begin_int4(const CUtensorMap& map, int expert, int num_tiles, int tile, int num_units, int unit) {
    map_ = &map, tile_ = tile % kInt4ColumnTiles;
    unit_ = (expert * (num_tiles / kInt4ColumnTiles) + tile / kInt4ColumnTiles) * num_units + unit;
  }

  // Lanes 0 and 1 have a piece's gates, four units each, lanes 2 and 3 its ups.
  __device__ __forceinline__ bool up(int lane) {
    const int item = at_.tile(n_), i = item / kGateTiles, tile = item % kGateTiles;
    if (i >= chosen_.num_experts) return false;
    const DecodeSpan span = segment_units(units_of(Dims::kDim), at_.warp);
    const int is_up = lane / 2 % 2, part = lane % 2;
    begin_int4(k_.maps[layer_].gate_up, chosen_.expert[i], 2 * kGateTiles, tile + is_up * kGateTiles, units_of(Dims::kDim),
               span.begin + part * kBoxUnits);
    to_ = is_up * kUpsAt + part * kBoxBytes, units_ = 2 * span.size(), is_pair_ = true;
    return true;
  }

  // Of each tile some experts at a time, four units of each, a lane's; then the shared one.
  __device__ __forceinline__ bool down(const DecodeLayer& w, int lane) {
    const int turns = (chosen_.num_experts + kDownExperts - 1) / kDownExperts + 1, round = n_ / turns, turn = n_ - round * turns;
    const int tile = at_.tile_of_two(round);
    if (tile >= tiles_of(Dims::kDim)) return false;
    if (turn + 1 == turns)
      return floats(w.shared_down, tile, units_of(Dims::kSharedWidth), half_units(units_of(Dims::kSharedWidth), at_.half()));
    const int count = min(kDownExperts, chosen_.num_experts - turn * kDownExperts);
    begin_int4(k_.maps[layer_].down, chosen_.expert[turn * kDownExperts + min(lane, count - 1)], tiles_of(Dims::kDim), tile,
               units_of(Dims::kWidth), at_.half() * kDownUnits);
    to_ = lane * kBoxBytes, units_ = count * kDownUnits, is_pair_ = false;
    return true;
  }

  // The n-th job of the phase; false where there is none.
  __device__ __forceinline__ bool find(const DecodeLayer& w, int lane) {
    switch (phase_) {
      case kJoint: return by_block(w.q_kv_a, tiles_of(kJointOut), units_of(Dims::kDim));
      case kQueryPhase: return by_block(w.q_b, tiles_of(kQueryOut), units_of(Dims::kQuery));
      case kAbsorb: return by_halves(w.w_kc, tiles_of(Dims::kHeads * Dims::kLatent), units_of(Dims::kNope));
      case kValues: return by_block(w.w_vc, tiles_of(kValueOut), units_of(Dims::kLatent));
      case kOutput: return by_halves(w.o_proj, tiles_of(Dims::kDim), units_of(kValueOut));
      case kRouter: return router(w);
      case kUp: return up(lane);
      case kDown: return down(w, lane);
    }
    return false;
  }
};

}  // namespace kdtree
