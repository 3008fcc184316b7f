// cache_append and cache_compact: rows of the latent cache, written and moved. Nothing is written outside the cache.
#include "cuda_rows.cuh"

namespace kdtree {
namespace {

__global__ void __launch_bounds__(128)
    cache_append_kernel(CacheAppendArgs a, int64_t latent_bytes, int64_t rope_bytes) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const int64_t row = blockIdx.x;
  if (row >= rows_in_use(a.num_rows_device, a.num_rows)) return;
  const int32_t stream = a.stream[row], slot = a.slot[row];
  if (stream < 0 || stream >= a.num_streams || slot < 0 || slot >= a.num_slots) return;
  char* to = static_cast<char*>(a.cache) + (stream * a.num_slots + slot) * (latent_bytes + rope_bytes);
  copy_row(to, static_cast<const char*>(a.latent) + row * latent_bytes, latent_bytes);
  copy_row(to + latent_bytes, static_cast<const char*>(a.k_rope) + row * rope_bytes, rope_bytes);
}

// One thread moves one unit of every accepted row, in ascending j. A node's index is above its place j + 1 among the
// accepted, so what a batch of loads reads was not written by the batches before it.
template <class Unit>
__device__ void compact_units(char* root, const int32_t* path, int count, int64_t row_bytes) {
  constexpr int kBatch = 8;
  for (int64_t i = threadIdx.x; i < row_bytes / int64_t(sizeof(Unit)); i += blockDim.x)
    for (int begin = 0; begin < count; begin += kBatch) {
      Unit values[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j)
        if (begin + j < count) values[j] = reinterpret_cast<const Unit*>(root + path[begin + j] * row_bytes)[i];
#pragma unroll
      for (int j = 0; j < kBatch; ++j)
        if (begin + j < count) reinterpret_cast<Unit*>(root + (begin + j + 1) * row_bytes)[i] = values[j];
    }
}

__device__ bool path_is_valid(const CacheCompactArgs& a, const int32_t* path, int count, int32_t prefix) {
  if (count < 0 || count > a.max_depth || prefix < 0) return false;
  for (int j = 0; j < count; ++j)
    if (path[j] <= (j > 0 ? path[j - 1] : 0) || int64_t(prefix) + path[j] >= a.num_slots) return false;
  return true;
}

__global__ void __launch_bounds__(128) cache_compact_kernel(CacheCompactArgs a, int64_t row_bytes) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const int64_t s = blockIdx.x % a.num_streams;
  const int32_t* path = a.accepted_path + s * a.max_depth;
  const int count = a.num_accepted[s];
  if (count == 0 || !path_is_valid(a, path, count, a.prefix_len[s])) return;
  char* slots = static_cast<char*>(a.cache) + int64_t(blockIdx.x) * a.num_slots * row_bytes;
  char* root = slots + a.prefix_len[s] * row_bytes;
  if ((reinterpret_cast<uintptr_t>(root) | uint64_t(row_bytes)) % 16 == 0)
    compact_units<uint4>(root, path, count, row_bytes);
  else
    compact_units<uint16_t>(root, path, count, row_bytes);
}

}  // namespace

int cache_append_cuda(const CacheAppendArgs& a, void* stream) {
  if (a.num_rows == 0) return kOk;
  const int64_t bytes = element_bytes(a.dtype);
  return launch(cache_append_kernel, {dim3(a.num_rows), dim3(128), 0, 1, Start::kEarly}, stream, a, a.latent_dim * bytes,
                a.rope_dim * bytes);
}

int cache_compact_cuda(const CacheCompactArgs& a, void* stream) {
  if (a.num_layers == 0 || a.num_streams == 0) return kOk;
  return launch(cache_compact_kernel, {dim3(a.num_layers * a.num_streams), dim3(128), 0, 1, Start::kEarly}, stream, a,
                a.width * element_bytes(a.dtype));
}

}  // namespace kdtree
