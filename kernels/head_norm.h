// CPU: one head of a query or key, normalised and turned: rms_norm with the head's weights, then rope, each operation
// rounded in FP32 and the result once to its type. The sum of squares is that of rms_norm.
#pragma once
#include <cmath>

#include "vec16.h"

namespace kdtree {

template <class Float>
void norm_and_turn(const Float* x, const Float* weight, float eps, const float* cos_sin, int64_t dim, Float* out) {
  Vec16 squares = Vec16::all(0.0f);
  for (int64_t i = 0; i < dim; i += kLanes) {
    const Vec16 value = load_first(x + i, dim - i);
    squares = fma(value, value, squares);
  }
  const float scale = 1.0f / std::sqrt(sum_lanes(squares) / float(dim) + eps);
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float a = widen(x[i]) * scale * widen(weight[i]), b = widen(x[i + half]) * scale * widen(weight[i + half]);
    const float cosine = cos_sin[i], sine = cos_sin[i + half];
    out[i] = narrow<Float>(a * cosine - b * sine);
    out[i + half] = narrow<Float>(b * cosine + a * sine);
  }
}

}  // namespace kdtree
