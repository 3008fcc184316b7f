// rms_norm: out = x * (1 / sqrt(mean(x^2) + eps)) * weight, FP32 until the one rounding.
//
// Order of additions: thread t of 256 takes chunks t, t + 256, … of 8 elements and adds their squares by fma in
// ascending order; then block_sum. It depends on D alone, not on the number of rows or on the alignment of x.
#include "cuda_rows.cuh"

namespace kdtree {
namespace {

constexpr int kThreads = 256;

template <class Float>
__global__ void __launch_bounds__(kThreads) rms_norm_kernel(RmsNormArgs a) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const int64_t row = blockIdx.x;
  if (row >= rows_in_use(a.num_rows_device, a.num_rows)) return;
  const Float* x = static_cast<const Float*>(a.x) + row * a.x_stride;
  const Float* weight = static_cast<const Float*>(a.weight);
  Float* out = static_cast<Float*>(a.out) + row * a.dim;
  float squares = 0.0f;
  for (int64_t i = threadIdx.x * kChunk; i < a.dim; i += kThreads * kChunk) {
    float v[kChunk];
    load_chunk(x + i, a.dim - i, v);
#pragma unroll
    for (int k = 0; k < kChunk; ++k) squares = __fmaf_rn(v[k], v[k], squares);
  }
  const float mean = __fdiv_rn(block_sum<kThreads>(squares), float(a.dim));
  const float scale = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, a.eps)));
  for (int64_t i = threadIdx.x * kChunk; i < a.dim; i += kThreads * kChunk) {
    float v[kChunk], w[kChunk];
    load_chunk(x + i, a.dim - i, v);
    load_chunk(weight + i, a.dim - i, w);
#pragma unroll
    for (int k = 0; k < kChunk; ++k) v[k] = __fmul_rn(__fmul_rn(v[k], scale), w[k]);
    store_chunk(out + i, a.dim - i, v);
  }
}

}  // namespace

int rms_norm_cuda(const RmsNormArgs& a, void* stream) {
  if (a.num_rows == 0) return kOk;
  return with_dtype(a.dtype, [&](auto element) {
    return launch(rms_norm_kernel<decltype(element)>, {dim3(a.num_rows), dim3(kThreads), 0, 1, Start::kEarly}, stream, a);
  });
}

}  // namespace kdtree
