// CPU: NeoX rotation of one head. Each product and each sum is rounded in FP32, then the result to its type.
#pragma once
#include "bf16.h"

namespace kdtree {

// Pairs (i, i + half) of x, turned by the angles of cos_sin: `half` cosines, then `half` sines.
template <class Float>
void rotate(const Float* x, const float* cos_sin, Float* out, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float a = widen(x[i]), b = widen(x[i + half]);
    const float cosine = cos_sin[i], sine = cos_sin[i + half];
    out[i] = narrow<Float>(a * cosine - b * sine);
    out[i + half] = narrow<Float>(b * cosine + a * sine);
  }
}

}  // namespace kdtree
