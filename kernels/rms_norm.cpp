// rms_norm: out = x * (1 / sqrt(mean(x^2) + eps)) * weight, per row.
#include "norm_row.h"
#include "op_args.h"
#include "parallel.h"
#include "rows_in_use.h"

namespace kdtree {
namespace {

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
