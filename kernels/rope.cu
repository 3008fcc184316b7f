// rope: NeoX rotation of pairs (i, i + R/2) by the angle of the row's absolute position. A position outside the table
// gives NaN.
#include "cuda_rows.cuh"
#include "rotate.cuh"

namespace kdtree {
namespace {

constexpr int kThreads = 256;

template <class Float>
__global__ void __launch_bounds__(kThreads) rope_kernel(RopeArgs a) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const int64_t row = blockIdx.x;
  if (row >= rows_in_use(a.num_rows_device, a.num_rows)) return;
  const int half = int(a.dim / 2), num_pairs = int(a.num_heads) * half;
  Float* out = static_cast<Float*>(a.out) + row * a.num_heads * a.dim;
  const int32_t position = a.position[row];
  if (position < 0 || position >= a.num_positions) {
    poison_row(reinterpret_cast<char*>(out), a.num_heads * a.dim * int64_t(sizeof(Float)));
    return;
  }
  const float* cos_sin = a.cos_sin + position * a.dim;
  for (int pair = threadIdx.x; pair < num_pairs; pair += kThreads) {
    const int head = pair / half, i = pair % half;
    const Float* x = static_cast<const Float*>(a.x) + row * a.x_row_stride + head * a.x_head_stride;
    rotate_pair(x, cos_sin, out + int64_t(head) * a.dim, i, half);
  }
}

}  // namespace

int rope_cuda(const RopeArgs& a, void* stream) {
  if (a.dim % 2) return kUnsupported;
  if (a.num_rows == 0) return kOk;
  return with_dtype(a.dtype, [&](auto element) {
    return launch(rope_kernel<decltype(element)>, {dim3(a.num_rows), dim3(kThreads), 0, 1, Start::kEarly}, stream, a);
  });
}

}  // namespace kdtree
