// swiglu and residual_add: element by element, FP32 inside, one rounding.
#include "swiglu.cuh"

namespace kdtree {
namespace {

constexpr int kThreads = 128;

template <class Float>
__global__ void __launch_bounds__(kThreads) swiglu_kernel(SwigluArgs a) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const int64_t row = blockIdx.x, i = (int64_t(blockIdx.y) * kThreads + threadIdx.x) * kChunk;
  if (row >= rows_in_use(a.num_rows_device, a.num_rows) || i >= a.dim) return;
  swiglu_chunk(static_cast<const Float*>(a.gate_up) + row * 2 * a.dim, static_cast<Float*>(a.out) + row * a.dim, a.dim, i);
}

template <class Float>
__global__ void __launch_bounds__(kThreads) residual_add_kernel(ResidualAddArgs a) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const int64_t row = blockIdx.x, i = (int64_t(blockIdx.y) * kThreads + threadIdx.x) * kChunk;
  if (row >= rows_in_use(a.num_rows_device, a.num_rows) || i >= a.dim) return;
  const int64_t at = row * a.dim + i;
  float x[kChunk], y[kChunk];
  load_chunk(static_cast<const Float*>(a.x) + at, a.dim - i, x);
  load_chunk(static_cast<const Float*>(a.y) + at, a.dim - i, y);
#pragma unroll
  for (int k = 0; k < kChunk; ++k) x[k] = __fadd_rn(x[k], y[k]);
  store_chunk(static_cast<Float*>(a.out) + at, a.dim - i, x);
}

template <class Args>
dim3 grid_of(const Args& a) {
  return dim3(a.num_rows, ceil_div(a.dim, kThreads * kChunk));
}

}  // namespace

int swiglu_cuda(const SwigluArgs& a, void* stream) {
  if (a.num_rows == 0 || a.dim == 0) return kOk;
  return with_dtype(a.dtype, [&](auto element) {
    return launch(swiglu_kernel<decltype(element)>, {grid_of(a), dim3(kThreads), 0, 1, Start::kEarly}, stream, a);
  });
}

int residual_add_cuda(const ResidualAddArgs& a, void* stream) {
  if (a.num_rows == 0 || a.dim == 0) return kOk;
  return with_dtype(a.dtype, [&](auto element) {
    return launch(residual_add_kernel<decltype(element)>, {grid_of(a), dim3(kThreads), 0, 1, Start::kEarly}, stream, a);
  });
}

}  // namespace kdtree
