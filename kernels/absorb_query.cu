// absorb_query: where the product takes a shape without stages, blocks behind its own turn the rest of the queries, in the
// same launch. Otherwise the product is large, and rope is a launch of its own. The bits are those of linear and rope.
#include "absorb_query.h"
#include "linear.cuh"
#include "linear_direct.cuh"
#include "rotate.cuh"

namespace kdtree {
namespace {

// Pairs `block` * blockDim.x … of head blockIdx.y, counted through its rows.
template <class Float>
__device__ __forceinline__ void rotate_head(const RopeArgs& a, int block) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const int half = static_cast<int>(a.dim / 2), pair = block * blockDim.x + threadIdx.x, row = pair / half, i = pair % half;
  if (row >= rows_in_use(a.num_rows_device, a.num_rows)) return;
  const int64_t head = blockIdx.y;
  const Float* x = static_cast<const Float*>(a.x) + row * a.x_row_stride + head * a.x_head_stride;
  Float* out = static_cast<Float*>(a.out) + (row * a.num_heads + head) * a.dim;
  const int32_t position = a.position[row];
  if (position < 0 || position >= a.num_positions) out[i] = out[i + half] = from_float<Float>(__int_as_float(0x7fffffff));
  else rotate_pair(x, a.cos_sin + position * a.dim, out, i, half);
}

template <class S>
__global__ void __launch_bounds__(S::kThreads, S::kMinBlocks)
    absorb_query_kernel(const __grid_constant__ TileArgs product, const __grid_constant__ RopeArgs rope, int num_blocks) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int block = blockIdx.x;
  if (block < num_blocks) do_direct<S>(product, block, shared);
  else rotate_head<typename S::T>(rope, block - num_blocks);
}

template <class S>
int launch_absorb(TileArgs product, const RopeArgs& rope, void* stream) {
  const int64_t num_blocks = count_blocks<S>(&product);
  const int64_t num_more = ceil_div(rope.num_rows * (rope.dim / 2), S::kThreads);
  if (num_blocks + num_more > INT32_MAX / S::kThreads || rope.num_heads > 65535) return kUnsupported;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(num_blocks + num_more), static_cast<unsigned>(rope.num_heads));
  shape.block = dim3(S::kThreads);
  shape.shared_bytes = S::kSharedBytes;
  shape.start = Start::kEarly;
  return launch(absorb_query_kernel<S>, shape, stream, product, rope, static_cast<int>(num_blocks));
}

// With the shape without stages that has `wanted`'s rows and outputs.
template <class First, class... Rest>
int launch_like(const LinearShape& wanted, const TileArgs& product, const RopeArgs& rope, void* stream) {
  if (wanted.num_rows == First::kBlockRows && wanted.num_out == First::kBlockOut)
    return launch_absorb<First>(product, rope, stream);
  if constexpr (sizeof...(Rest) > 0) return launch_like<Rest...>(wanted, product, rope, stream);
  else return kUnsupported;
}

int apart(const LinearArgs& product, const RopeArgs& rope, void* stream) {
  const int status = linear_cuda(product, stream);
  return status == kOk ? rope_cuda(rope, stream) : status;
}

}  // namespace

int absorb_query_cuda(const AbsorbQueryArgs& a, void* stream) {
  if (a.rope_dim % 2) return kUnsupported;
  LinearArgs product = product_of(a);
  const RopeArgs rope = rope_of(a);
  const bool is_empty = a.num_rows == 0 || a.num_heads == 0 || a.latent_dim == 0 || a.nope_dim == 0 || a.rope_dim == 0;
  if (is_empty || a.dtype != kBF16) return apart(product, rope, stream);
  LinearDevice device;
  if (int status = linear_device(&device)) return status;
  const LinearShape& shape = linear_shape(a.dtype, choose_linear_shape(product, device));
  if (!shape.direct || reinterpret_cast<uintptr_t>(a.packed) % 16 != 0) return apart(product, rope, stream);
  product.weights_settled = reads_weights_early(product, shape, device);
  return launch_like<DirectShape<1, 1, 2>, DirectShape<2, 1, 2>, DirectShape<2, 2, 2>, DirectShape<1, 3, 2>,
                     DirectShape<1, 4, 2>>(shape, linear_tile_args(product), rope, stream);
}

}  // namespace kdtree
