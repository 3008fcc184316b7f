// latent_append: three kinds of blocks, one launch. For each row one block norms the latent into its slot of the cache, one
// turns the key into it, and where queries have a latent one norms that. Nothing is written outside the cache; a position
// outside the table gives a key of NaN. The bits are those of rms_norm, rope and cache_append.
#include "norm_row.cuh"
#include "rotate.cuh"

namespace kdtree {
namespace {

enum Part { kLatent, kKey, kQuery };

// Where a row lies in the cache; null outside of it.
template <class Float>
__device__ __forceinline__ Float* slot_of(const LatentAppendArgs& a, int64_t row) {
  const int32_t stream = a.stream[row], slot = a.slot[row];
  if (stream < 0 || stream >= a.num_streams || slot < 0 || slot >= a.num_slots) return nullptr;
  return static_cast<Float*>(a.cache) + (stream * a.num_slots + slot) * (a.latent_dim + a.rope_dim);
}

template <class Float>
__device__ __forceinline__ void turn_key(const LatentAppendArgs& a, int64_t row, const Float* key, Float* out) {
  const int32_t position = a.position[row];
  if (out == nullptr) return;
  if (position < 0 || position >= a.num_positions) {
    poison_row(reinterpret_cast<char*>(out), a.rope_dim * int64_t(sizeof(Float)));
    return;
  }
  const int half = static_cast<int>(a.rope_dim / 2);
  for (int i = threadIdx.x; i < half; i += blockDim.x)
    rotate_pair(key, a.cos_sin + position * a.rope_dim, out, i, half);
}

template <class Float, bool kAligned>
__global__ void __launch_bounds__(kMaxNormThreads) latent_append_kernel(LatentAppendArgs a) {
  allow_next_kernel();
  const Part part = static_cast<Part>(blockIdx.y);
  const int64_t row = blockIdx.x, dim = part == kQuery ? a.query_dim : part == kLatent ? a.latent_dim : 0;
  const Float* weight = static_cast<const Float*>(part == kQuery ? a.q_norm : a.kv_norm);
  const Float* x = static_cast<const Float*>(a.q_kv) + row * a.q_kv_stride + (part == kQuery ? 0 : a.query_dim);
  RowNorm<kAligned, Float> norm(static_cast<int>(dim));
  if (a.weights_settled) norm.read_weight(weight);
  wait_for_previous_kernel();
  const int num_rows = rows_in_use(a.num_rows_device, a.num_rows);  // on its way together with x
  norm.read_row(x);
  if (!a.weights_settled) norm.read_weight(weight);
  if (row >= num_rows) return;
  Float* out = part == kQuery ? static_cast<Float*>(a.q) + row * dim : slot_of<Float>(a, row);
  if (part == kKey) turn_key(a, row, x + a.latent_dim, out == nullptr ? out : out + a.latent_dim);
  else norm.write(out, a.eps);
}

}  // namespace

int latent_append_cuda(const LatentAppendArgs& a, void* stream) {
  if (a.rope_dim % 2 || a.query_dim > kMaxNormDim || a.latent_dim > kMaxNormDim || a.rope_dim > kMaxNormDim)
    return kUnsupported;
  if (a.num_rows == 0) return kOk;
  const int num_threads = std::max(norm_threads(a.query_dim), norm_threads(a.latent_dim));
  const LaunchShape shape{dim3(a.num_rows, a.query_dim > 0 ? 3 : 2), dim3(num_threads), 0, 1, Start::kEarly};
  return with_dtype(a.dtype, [&](auto element) {
    using Float = decltype(element);
    const bool aligned = in_whole_chunks({a.q_kv, a.q_norm, a.kv_norm, a.q, a.cache},
                                         {a.q_kv_stride, a.query_dim, a.latent_dim, a.rope_dim});
    return launch(aligned ? latent_append_kernel<Float, true> : latent_append_kernel<Float, false>, shape, stream, a);
  });
}

}  // namespace kdtree
