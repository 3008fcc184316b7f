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
constexpr int kNoMore = -1;

struct Dealt {
  int block, num_blocks, warp;

  // The n-th segment of this warp. The phase before begins with the first warps, this one with others, whose rings then fill at
  // the same time.
  __device__ __forceinline__ int segment(int n) const {
    return (n * kDecodeWarps + (warp + kRouterShift) % kDecodeWarps) * num_blocks + block;
  }
  __device__ __forceinline__ int tile_of_two(int n) const { return (n * kPairs + warp / 2) * num_blocks + block; }
  __device__ __forceinline__ int half() const { return warp % 2; }
};

__device__ __forceinline__ DecodeSpan half_units(int num_units, int half) {
  return {half * num_units / 2, (half + 1) * num_units / 2};
}

class Jobs {
 public:
  int num_routed = 0;  // layers whose experts are known

  __device__ __forceinline__ Jobs(const DecodeArgs& k, const Chosen& chosen, Dealt at)
      : k_(k), chosen_(chosen), at_(at), phase_(k.a.first_phase) {}

  __device__ __forceinline__ Job next() {
#pragma unroll 1
    while (layer_ < k_.a.num_layers) {
      if (phase_ >= kUp && num_routed <= layer_) break;
      const Job job = find(k_.layers[layer_]);
      ++n_;
      if (job.num_units > 0) return job;
      if (job.num_units == 0) continue;
      n_ = 0;
      if (++phase_ >= k_.a.end_phase) phase_ = k_.a.first_phase, ++layer_;
    }
    return {nullptr, 0, 0, Weights::kFloats};
  }

 private:
  const DecodeArgs& k_;
  const Chosen& chosen_;
  const Dealt at_;
  int layer_ = 0, phase_, n_ = 0;

  static __device__ __forceinline__ Job none() { return {nullptr, 0, kNoMore, Weights::kFloats}; }

  static __device__ __forceinline__ Job floats(const void* packed, int tile, int num_units, DecodeSpan span) {
    const int64_t first = int64_t(tile) * num_units + span.begin;
    return {static_cast<const char*>(packed) + first * kBf16UnitBytes, 0, span.size(), Weights::kFloats};
  }

  static __device__ __forceinline__ const char* int4_block(const void* packed, int expert, int num_tiles, int tile, int num_units,
                                                           int unit) {
    const int64_t place = (int64_t(expert) * (num_tiles / kInt4ColumnTiles) + tile / kInt4ColumnTiles) * num_units + unit;
    return static_cast<const char*>(packed) + place * kColumnUnitBytes + tile % kInt4ColumnTiles * kInt4BlockBytes;
  }

  __device__ __forceinline__ Job router(const DecodeLayer& w) const {
    const int place = at_.segment(n_), tile = place / kNumSegments, routed = k_.sizes.router_tiles;
    if (tile >= routed + 2 * k_.sizes.shared_tiles) return none();
    const bool is_shared = tile >= routed;
    return floats(is_shared ? w.shared_gate_up : w.router, is_shared ? tile - routed : tile, k_.sizes.dim_units,
                  segment_units(k_.sizes.dim_units, place % kNumSegments));
  }

  __device__ __forceinline__ Job up(const DecodeLayer& w) const {
    const int gates = k_.sizes.gate_tiles, item = at_.block + n_ * at_.num_blocks, i = item / gates, tile = item - i * gates;
    if (i >= chosen_.num_experts) return none();
    const int expert = chosen_.expert[i], num_units = k_.sizes.dim_units;
    const DecodeSpan span = segment_units(num_units, at_.warp);
    const char* from = int4_block(w.gate_up, expert, 2 * gates, tile, num_units, span.begin);
    const char* second = int4_block(w.gate_up, expert, 2 * gates, tile + gates, num_units, span.begin);
    return {from, static_cast<uint32_t>(second - from), span.size(), Weights::kPair};
  }

  // Of each tile the experts in their order, then the shared one.
  __device__ __forceinline__ Job down(const DecodeLayer& w) const {
    const int num_sources = chosen_.num_experts + 1, turn = n_ / num_sources, source = n_ - turn * num_sources;
    const int tile = at_.tile_of_two(turn), num_tiles = k_.sizes.dim_tiles;
    if (tile >= num_tiles) return none();
    if (source == chosen_.num_experts)
      return floats(w.shared_down, tile, k_.sizes.shared_units, half_units(k_.sizes.shared_units, at_.half()));
    const int num_units = k_.sizes.width_units;
    const DecodeSpan span = half_units(num_units, at_.half());
    return {int4_block(w.down, chosen_.expert[source], num_tiles, tile, num_units, span.begin), 0, span.size(), Weights::kInt4};
  }

  // The n-th job of the phase; num_units kNoMore where there is none.
  __device__ __forceinline__ Job find(const DecodeLayer& w) const {
    if (phase_ == kLeaves) return none();
    if (phase_ == kRouter) return router(w);
    if (phase_ == kUp) return up(w);
    if (phase_ == kDown) return down(w);
    const DecodeSizes& s = k_.sizes;
    const bool halves = phase_ == kAbsorb || phase_ == kOutput;
    const int tile = halves ? at_.tile_of_two(n_) : at_.block + n_ * at_.num_blocks;
    const void* packed = phase_ == kJoint ? w.q_kv_a : phase_ == kQueryPhase ? w.q_b : phase_ == kAbsorb ? w.w_kc :
                         phase_ == kValues ? w.w_vc : w.o_proj;
    const int num_tiles = phase_ == kJoint ? s.joint_tiles : phase_ == kQueryPhase ? s.query_tiles :
                          phase_ == kAbsorb ? s.absorb_tiles : phase_ == kValues ? s.value_tiles : s.dim_tiles;
    const int num_units = phase_ == kJoint ? s.dim_units : phase_ == kQueryPhase ? s.query_units :
                          phase_ == kAbsorb ? s.nope_units : phase_ == kValues ? s.latent_units : s.value_units;
    if (tile >= num_tiles) return none();
    return floats(packed, tile, num_units, halves ? half_units(num_units, at_.half()) : segment_units(num_units, at_.warp));
  }
};

}  // namespace kdtree
