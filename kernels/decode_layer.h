// What decode_layers knows of a layer, and the only dimensions that it is made for.
#pragma once
#include "op_args.h"

namespace kdtree {

// Addresses of a layer's tensors, in the order of DecodeLayersArgs::pointers.
struct DecodeLayer {
  const void *norm, *q_kv_a, *q_norm, *kv_norm, *q_b, *w_kc, *w_vc, *o_proj;
  void* cache;
  const void *moe_norm, *router;
  const float* bias;
  const void *gate_up, *down, *shared_gate_up, *shared_down;
};
constexpr int kDecodePointers = sizeof(DecodeLayer) / sizeof(void*);
static_assert(kDecodePointers == 16, "op_args.h names them");

constexpr int kMaxDecodeLayers = 64, kMaxDecodeRows = 4;

// One of eight ranks of Kimi K2 and K2.6.
struct DecodeDims {
  static constexpr int kDim = 7168, kQuery = 1536, kLatent = 512, kNope = 128, kRope = 64, kValue = 128, kHeads = 8;
  static constexpr int kExperts = 384, kTopK = 8, kWidth = 256, kSharedWidth = 256;
};

// The phases of a layer. Between two of them all blocks meet.
enum DecodePhase : int {
  kJoint,       // norm; queries' latents, latents and keys in one product
  kQueryPhase,  // norms; queries of their latents; latents and keys into the cache
  kAbsorb,      // queries into latent space
  kLeaves,      // attention, leaf by leaf
  kValues,      // leaves folded; values out of latent space
  kOutput,      // output projection and residual
  kRouter,      // norm; logits of the experts, gates and ups of the shared one, in segments
  kUp,          // routing; gates and ups of the chosen experts, swiglu
  kDown,        // down products, weighted sums and residual
  kNumDecodePhases,
};

}  // namespace kdtree
