// Which weights each warp of decode_layers multiplies, and in which order: the same list for the ring that brings them and for
// the phases that use them.
//   by block    a tile of 16 outputs for each block in turn, a segment for each of its 8 warps
//   by warp     a whole tile for each warp, consecutive ones in different blocks
//   by segment  a segment of a tile for each warp
#pragma once
#include "decode_work.cuh"

namespace kdtree {

// Place of the n-th tile, or segment, that a warp has in a phase that deals them out by warp; `shift` lets two phases one after
// the other begin with different warps, whose rings then fill at the same time.
struct Dealt {
  int block, num_blocks, warp;
  __device__ __forceinline__ int place(int n, int shift = 0) const {
    return (n * kDecodeWarps + (warp + shift) % kDecodeWarps) * num_blocks + block;
  }
};

constexpr int kRouterShift = kDecodeWarps / 2;
constexpr int kNoMore = -1;

class Jobs {
 public:
  const Dealt at;
  int num_routed;  // layers whose experts are known

  __device__ __forceinline__ Jobs(const DecodeArgs& k, const Chosen& chosen, Dealt at)
      : at(at), num_routed(0), k_(k), chosen_(chosen), phase_(k.a.first_phase) {}

  __device__ __forceinline__ Job next() {
#pragma unroll 1
    while (layer_ < k_.a.num_layers) {
      const bool chooses = phase_ == kUp || phase_ == kDown;
      if (phase_ < k_.a.end_phase && chooses && num_routed <= layer_) break;
      if (phase_ < k_.a.end_phase) {
        const Job job = find(k_.layers[layer_], n_);
        if (job.num_units != kNoMore) ++n_;
        if (job.num_units > 0) return job;
        if (job.num_units == 0) continue;
      }
      n_ = 0;
      if (++phase_ >= k_.a.end_phase) phase_ = k_.a.first_phase, ++layer_;
    }
    return {nullptr, 0, 0, Weights::kFloats};
  }

 private:
  const DecodeArgs& k_;
  const Chosen& chosen_;
  int layer_ = 0, phase_, n_ = 0;

  static __device__ __forceinline__ Job none() { return {nullptr, 0, kNoMore, Weights::kFloats}; }

  // Units of segment s, or all of them, of a tile of BF16 weights.
  static __device__ __forceinline__ Job floats(const void* packed, int tile, int num_units, int s) {
    const DecodeSpan span = s < 0 ? DecodeSpan{0, num_units} : segment_units(num_units, s);
    const int64_t first = int64_t(tile) * num_units + span.begin;
    return {static_cast<const char*>(packed) + first * kBf16UnitBytes, 0, span.size(), Weights::kFloats};
  }

  static __device__ __forceinline__ const char* int4_block(const void* packed, int expert, int num_tiles, int tile, int num_units,
                                                           int unit) {
    const int64_t columns = num_tiles / kInt4ColumnTiles;
    const int64_t place = (expert * columns + tile / kInt4ColumnTiles) * num_units + unit;
    return static_cast<const char*>(packed) + place * kColumnUnitBytes + tile % kInt4ColumnTiles * kInt4BlockBytes;
  }

  __device__ __forceinline__ Job by_block(const void* packed, int n, int num_tiles, int64_t num_in) const {
    const int tile = at.block + n * at.num_blocks;
    return tile < num_tiles ? floats(packed, tile, int(num_in) / kUnitInputs, at.warp) : none();
  }
  __device__ __forceinline__ Job by_warp(const void* packed, int n, int num_tiles, int64_t num_in) const {
    const int tile = at.place(n);
    return tile < num_tiles ? floats(packed, tile, int(num_in) / kUnitInputs, -1) : none();
  }

  __device__ __forceinline__ Job router(const DecodeLayer& w, int n) const {
    const int place = at.place(n, kRouterShift), tile = place / kNumSegments, routed = k_.router_tiles();
    if (tile >= routed + 2 * k_.shared_tiles()) return none();
    const int num_units = int(k_.a.dim) / kUnitInputs, s = place % kNumSegments;
    return tile < routed ? floats(w.router, tile, num_units, s) : floats(w.shared_gate_up, tile - routed, num_units, s);
  }

  __device__ __forceinline__ Job up(const DecodeLayer& w, int n) const {
    const int gates = int(k_.a.width) / kTileOut, item = at.block + n * at.num_blocks, i = item / gates, tile = item % gates;
    if (i >= chosen_.num_experts) return none();
    const int num_units = int(k_.a.dim) / kUnitInputs, expert = chosen_.expert[i];
    const DecodeSpan span = segment_units(num_units, at.warp);
    const char* from = int4_block(w.gate_up, expert, 2 * gates, tile, num_units, span.begin);
    const char* second = int4_block(w.gate_up, expert, 2 * gates, tile + gates, num_units, span.begin);
    return {from, static_cast<uint32_t>(second - from), span.size(), Weights::kPair};
  }

  // Of each tile the experts in their order, then the shared one.
  __device__ __forceinline__ Job down(const DecodeLayer& w, int n) const {
    const int num_sources = chosen_.num_experts + 1, tile = at.place(n / num_sources), source = n % num_sources;
    const int num_tiles = int(k_.a.dim) / kTileOut, num_units = int(k_.a.width) / kUnitInputs;
    if (tile >= num_tiles) return none();
    if (source == chosen_.num_experts) return floats(w.shared_down, tile, int(k_.a.shared_width) / kUnitInputs, -1);
    return {int4_block(w.down, chosen_.expert[source], num_tiles, tile, num_units, 0), 0, num_units, Weights::kInt4};
  }

  // The n-th job of the phase; num_units kNoMore where there is none.
  __device__ __forceinline__ Job find(const DecodeLayer& w, int n) const {
    const DecodeLayersArgs& a = k_.a;
    switch (phase_) {
      case kJoint: return by_block(w.q_kv_a, n, k_.num_joint() / kTileOut, a.dim);
      case kQueries: return by_block(w.q_b, n, k_.num_query() / kTileOut, a.query_dim);
      case kAbsorb: return by_warp(w.w_kc, n, int(a.num_heads * a.latent_dim) / kTileOut, a.nope_dim);
      case kValues: return by_block(w.w_vc, n, k_.num_value() / kTileOut, a.latent_dim);
      case kOutput: return by_warp(w.o_proj, n, int(a.dim) / kTileOut, k_.num_value());
      case kRouter: return router(w, n);
      case kUp: return up(w, n);
      case kDown: return down(w, n);
    }
    return none();
  }
};

}  // namespace kdtree
