// rms_norm: out = x / sqrt(mean(x^2) + eps) * weight, FP32 until the one rounding.
//
// Order of additions: the chunks of 8 elements go to norm_threads(D) threads in turn; a thread adds the squares of its c-th
// chunk by fma in ascending order to sum c mod 4, then its four sums in pairs; then sum_in_pairs. It depends on D alone, not
// on the number of rows or on the alignment of x.
#include "norm_row.cuh"

namespace kdtree {
namespace {

template <class Float, bool kAligned>
__global__ void __launch_bounds__(kMaxNormThreads) rms_norm_kernel(RmsNormArgs a) {
  allow_next_kernel();
  const int64_t row = blockIdx.x;
  RowNorm<kAligned, Float> norm(static_cast<int>(a.dim));
  if (a.weights_settled) norm.read_weight(static_cast<const Float*>(a.weight));
  wait_for_previous_kernel();
  const int num_rows = rows_in_use(a.num_rows_device, a.num_rows);  // on its way together with x
  norm.read_row(static_cast<const Float*>(a.x) + row * a.x_stride);
  if (!a.weights_settled) norm.read_weight(static_cast<const Float*>(a.weight));
  if (row < num_rows) norm.write(static_cast<Float*>(a.out) + row * a.dim, a.eps);
}

}  // namespace

int rms_norm_cuda(const RmsNormArgs& a, void* stream) {
  if (a.dim > kMaxNormDim) return kUnsupported;
  if (a.num_rows == 0) return kOk;
  const LaunchShape shape{dim3(a.num_rows), dim3(norm_threads(a.dim)), 0, 1, Start::kEarly};
  return with_dtype(a.dtype, [&](auto element) {
    using Float = decltype(element);
    const bool aligned = in_whole_chunks({a.x, a.weight, a.out}, {a.x_stride, a.dim});
    return launch(aligned ? rms_norm_kernel<Float, true> : rms_norm_kernel<Float, false>, shape, stream, a);
  });
}

}  // namespace kdtree
