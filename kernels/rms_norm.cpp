// rms_norm: out = x * (1 / sqrt(mean(x^2) + eps)) * weight. The sum of squares runs in 16 lanes (lane = i mod 16) by
// fma and is closed by sum_lanes; everything is FP32 until the one rounding.
#include <cmath>

#include "op_args.h"
#include "parallel.h"
#include "rows_in_use.h"
#include "vec16.h"

namespace kdtree {
namespace {

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

template <class Float>
void rms_norm(const RmsNormArgs& a) {
  const int num_threads = threads_for(a.num_rows * a.dim, a.num_threads);
  run_shares(num_threads, a.num_rows, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t)
      norm_row(static_cast<const Float*>(a.x) + t * a.x_stride, static_cast<const Float*>(a.weight),
               static_cast<Float*>(a.out) + t * a.dim, a.dim, a.eps);
  });
}

}  // namespace

int rms_norm_cpu(const RmsNormArgs& args) {
  const RmsNormArgs a = with_rows_in_use(args);
  a.dtype == kF32 ? rms_norm<float>(a) : rms_norm<Bf16>(a);
  return kOk;
}

}  // namespace kdtree
