// A row of latent_append: its place in the cache, and its key there.
#pragma once
#include "cuda_rows.cuh"
#include "rotate.cuh"

namespace kdtree {

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

}  // namespace kdtree
