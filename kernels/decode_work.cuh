// What every part of decode_layers shares: the arguments of the kernel, the scratch memory of a launch, shared memory.
#pragma once
#include "decode_layer.h"
#include "decode_ring.cuh"
#include "verify_attn_few_plan.cuh"

namespace kdtree {

using Bf16 = __nv_bfloat16;
using Dims = DecodeDims;

// Units of 32 inputs of each reduction, tiles of 16 outputs of each product.
__host__ __device__ constexpr int units_of(int num_in) { return num_in / kUnitInputs; }
__host__ __device__ constexpr int tiles_of(int num_out) { return num_out / kTileOut; }
constexpr int kJointOut = Dims::kQuery + Dims::kLatent + Dims::kRope, kQueryOut = Dims::kHeads * (Dims::kNope + Dims::kRope);
constexpr int kValueOut = Dims::kHeads * Dims::kValue, kRouterTiles = tiles_of(Dims::kExperts);
constexpr int kSharedTiles = tiles_of(Dims::kSharedWidth), kGateTiles = tiles_of(Dims::kWidth);  // of gates, and of ups
constexpr int kAllRouterTiles = kRouterTiles + 2 * kSharedTiles;
static_assert(units_of(Dims::kWidth) == kNumSegments && units_of(Dims::kSharedWidth) == kNumSegments, "a unit a segment");

// Everything in BF16 lies as the operations' tensors do; sums as the accumulators of a warp, [tile, segment, lane, 4].
struct DecodeScratch {
  unsigned long long* num_met;  // blocks that have come to a meeting, of all launches
  Bf16 *q_kv, *q, *q_latent, *q_rope, *value, *hidden, *shared_hidden;
  float* sums;
};

// Of a layer's INT4 weights.
struct DecodeMaps {
  CUtensorMap gate_up, down;
};

struct DecodeArgs {
  DecodeLayersArgs a;
  DecodeScratch scratch;
  AttnLaunch attention;  // of which the cache is a layer's
  FewCosts costs;
  DecodeLayer layers[kMaxDecodeLayers];
  DecodeMaps maps[kMaxDecodeLayers];
};

// The experts that the rows of a layer chose, and what each row has of them.
constexpr int kMaxDecodePairs = kMaxDecodeRows * Dims::kTopK;
struct Chosen {
  int expert_id[kMaxDecodePairs];
  float weight[kMaxDecodePairs];
  unsigned bits[Dims::kExperts / 32];
  int num_experts;
  int expert[kMaxDecodePairs];                         // ascending
  signed char pair[kMaxDecodePairs][kMaxDecodeRows];   // of expert i and a row, or -1
};

// Shared memory: rings, then what a phase needs for itself, whose end is for sums of segments and for routing.
constexpr int kPhaseBytes = 77824, kRouteBytes = 8192, kSumsBytes = 2 * kDecodeWarps * kWarp * 16;
constexpr int kSumsAt = kPhaseBytes - kRouteBytes - kSumsBytes, kRouteAt = kPhaseBytes - kRouteBytes;
constexpr int kRowsBytes = kSumsAt;  // for rows of x
constexpr int kBarriersAt = kRingBytes, kChosenAt = kBarriersAt + kDecodeWarps * kRingSlots * 8;
constexpr int kPlanAt = kChosenAt + (int(sizeof(Chosen)) + 15) / 16 * 16;
constexpr int kAttentionAt = kPlanAt + (int(sizeof(FewPlan)) + 15) / 16 * 16;
constexpr int kPhaseAt = (kAttentionAt + int(sizeof(AttnLaunch)) + 1023) / 1024 * 1024, kDecodeSharedBytes = kPhaseAt + kPhaseBytes;
static_assert(kDecodeSharedBytes + 1024 <= 227 * 1024, "one block of a multiprocessor of Hopper");

__host__ __device__ constexpr int row_pitch(int num_in) { return num_in * 2 + 16; }  // bytes; 8 rows without bank conflicts
static_assert(kMaxDecodeRows * row_pitch(Dims::kDim) <= kRowsBytes);
static_assert(kMaxDecodePairs * row_pitch(Dims::kWidth) + kMaxDecodeRows * row_pitch(Dims::kSharedWidth) <= kRowsBytes);

struct DecodeSpan {
  int begin, end;
  __device__ __forceinline__ int size() const { return end - begin; }
};

// Units of segment s of a reduction over num_units.
__device__ __forceinline__ constexpr DecodeSpan segment_units(int num_units, int s) {
  return {s * num_units / kNumSegments, (s + 1) * num_units / kNumSegments};
}

}  // namespace kdtree
