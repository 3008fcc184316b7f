// add_partials on CUDA: element by element, FP32 inside, one rounding, the residual with a rounding of its own.
#include "cuda_rows.cuh"
#include "partials.h"

namespace kdtree {
namespace {

constexpr int kThreads = 128;

template <class Float, int kPartials>
__global__ void __launch_bounds__(kThreads) add_partials_kernel(AddPartialsArgs a) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const int64_t row = blockIdx.x, i = (int64_t(blockIdx.y) * kThreads + threadIdx.x) * kChunk;
  if (row >= rows_in_use(a.num_rows_device, a.num_rows) || i >= a.dim) return;
  const int64_t at = row * a.dim + i, stride = a.num_rows * a.dim;
  float sum[kPartials][kChunk];
#pragma unroll
  for (int p = 0; p < kPartials; ++p) load_chunk(a.partials + p * stride + at, a.dim - i, sum[p]);
#pragma unroll
  for (int width = 1; width < kPartials; width *= 2)
#pragma unroll
    for (int p = 0; p < kPartials; p += 2 * width)
#pragma unroll
      for (int k = 0; k < kChunk; ++k) sum[p][k] = __fadd_rn(sum[p][k], sum[p + width][k]);
  if (a.residual != nullptr) {
    float residual[kChunk];
    load_chunk(static_cast<const Float*>(a.residual) + at, a.dim - i, residual);
#pragma unroll
    for (int k = 0; k < kChunk; ++k) sum[0][k] = __fadd_rn(to_float(from_float<Float>(sum[0][k])), residual[k]);
  }
  store_chunk(static_cast<Float*>(a.out) + at, a.dim - i, sum[0]);
}

template <class Float, int kPartials>
int launch_add(const AddPartialsArgs& a, void* stream) {
  const dim3 grid(a.num_rows, ceil_div(a.dim, kThreads * kChunk));
  return launch(add_partials_kernel<Float, kPartials>, {grid, dim3(kThreads), 0, 1, Start::kEarly}, stream, a);
}

}  // namespace

int add_partials_cuda(const AddPartialsArgs& a, void* stream) {
  if (!is_num_partials(a.num_partials)) return kUnsupported;
  if (a.num_rows == 0 || a.dim == 0) return kOk;
  return with_dtype(a.dtype, [&](auto element) {
    using Float = decltype(element);
    if (a.num_partials == 1) return launch_add<Float, 1>(a, stream);
    if (a.num_partials == 2) return launch_add<Float, 2>(a, stream);
    return a.num_partials == 4 ? launch_add<Float, 4>(a, stream) : launch_add<Float, kMaxPartials>(a, stream);
  });
}

}  // namespace kdtree
