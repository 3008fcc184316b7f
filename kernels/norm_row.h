// CPU: one row of rms_norm. The sum of squares runs in 16 lanes (lane = i mod 16) by fma and is closed by sum_lanes;
// everything is FP32 until the one rounding.
#pragma once
#include <cmath>

#include "vec16.h"

namespace kdtree {

template <class Float>
void norm_row(const Float* x, const Float* weight, Float* out, int64_t dim, float eps) {
  Vec16 squares = Vec16::all(0.0f);
  for (int64_t i = 0; i < dim; i += kLanes) {
    const Vec16 value = load_first(x + i, dim - i);
    squares = fma(value, value, squares);
  }
  const Vec16 scale = Vec16::all(1.0f / std::sqrt(sum_lanes(squares) / float(dim) + eps));
  for (int64_t i = 0; i < dim; i += kLanes)
    store_first(load_first(x + i, dim - i) * scale * load_first(weight + i, dim - i), out + i, dim - i);
}

}  // namespace kdtree
