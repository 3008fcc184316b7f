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
    if (units_ == 0 && !find_job(lane)) return {nullptr, 0, 0};
    if (blocks_ == 0) {
      const int units = min(units_, kFloatUnits);
      const Piece piece{from_, units * kBf16UnitBytes, 0};
      from_ += kFloatUnits * kBf16UnitBytes, units_ -= units;
      return piece;
    }
    const int blocks = min(units_ * 2, blocks_);  // of gates and ups
    const Piece piece{from_, blocks * kInt4BlockBytes, blocks};
    from_ += kPairUnits * kColumnUnitBytes, units_ -= blocks / 2;
    return piece;
  }

 private:
  const DecodeArgs& k_;
  const Chosen& chosen_;
  const Dealt at_;
  int layer_ = 0, phase_, n_ = 0;
  const char* from_ = nullptr;  // of the job at hand: its next piece, of INT4 this lane's block of it
  int units_ = 0, blocks_ = 0;  // that are left; blocks of a whole piece, 0 of BF16

  // Not in line: it is needed once for many pieces.
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
    units_ = span.size(), blocks_ = 0;
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

  static __device__ __forceinline__ const char* int4_block(const void* packed, int expert, int num_tiles, int tile, int num_units,
                                                           int unit) {
    const int64_t place = int64_t(expert) * (num_tiles / kInt4ColumnTiles * num_units) + tile / kInt4ColumnTiles * num_units + unit;
    return static_cast<const char*>(packed) + place * kColumnUnitBytes + tile % kInt4ColumnTiles * kInt4BlockBytes;
  }

  // Lane 2 * u has the gates of a piece's u-th unit, the lane after it the ups.
  __device__ __forceinline__ bool up(const DecodeLayer& w, int lane) {
    const int item = at_.tile(n_), i = item / kGateTiles, tile = item % kGateTiles;
    if (i >= chosen_.num_experts) return false;
    const DecodeSpan span = segment_units(units_of(Dims::kDim), at_.warp);
    from_ = int4_block(w.gate_up, chosen_.expert[i], 2 * kGateTiles, tile + lane % 2 * kGateTiles, units_of(Dims::kDim),
                       span.begin + lane / 2);
    units_ = span.size(), blocks_ = 2 * kPairUnits;
    return true;
  }

  // Of each tile some experts at a time, four units of each; then the shared one. Lane 4 * i + u has the u-th unit of the i-th.
  __device__ __forceinline__ bool down(const DecodeLayer& w, int lane) {
    const int turns = (chosen_.num_experts + kDownExperts - 1) / kDownExperts + 1, round = n_ / turns, turn = n_ - round * turns;
    const int tile = at_.tile_of_two(round);
    if (tile >= tiles_of(Dims::kDim)) return false;
    if (turn + 1 == turns)
      return floats(w.shared_down, tile, units_of(Dims::kSharedWidth), half_units(units_of(Dims::kSharedWidth), at_.half()));
    const int count = min(kDownExperts, chosen_.num_experts - turn * kDownExperts);
    const int i = turn * kDownExperts + min(lane / kDownUnits, count - 1);
    from_ = int4_block(w.down, chosen_.expert[i], tiles_of(Dims::kDim), tile, units_of(Dims::kWidth),
                       at_.half() * kDownUnits + lane % kDownUnits);
    units_ = count * kDownUnits / 2, blocks_ = count * kDownUnits;
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
      case kUp: return up(w, lane);
      case kDown: return down(w, lane);
    }
    return false;
  }
};

}  // namespace kdtree
