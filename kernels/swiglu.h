// silu(gate) * up = gate / (1 + e^-gate) * up in FP32, for 16 lanes: shared by swiglu and moe_experts.
#pragma once
#include "vec16.h"

namespace kdtree {

inline Vec16 swiglu16(Vec16 gate, Vec16 up) {
  const Vec16 one = Vec16::all(1.0f);
  return gate / (one + exp(Vec16::all(0.0f) - gate)) * up;
}

}  // namespace kdtree
