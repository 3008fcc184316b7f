// Pieces of the row-wise CUDA kernels: chunks of 8 elements, copies and poison of whole rows, sums over a block.
#pragma once
#include "cuda_common.cuh"

namespace kdtree {

constexpr int kChunk = 8;  // consecutive elements of one thread: 16 bytes of BF16, 32 of FP32

__device__ __forceinline__ bool is_aligned16(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// v[k] = x[k]; x is aligned to 16 bytes.
template <class Float>
__device__ __forceinline__ void load_whole_chunk(const Float* x, float (&v)[kChunk]) {
  alignas(16) Float values[kChunk];
#pragma unroll
  for (int i = 0; i < int(sizeof(values) / 16); ++i)
    reinterpret_cast<uint4*>(values)[i] = reinterpret_cast<const uint4*>(x)[i];
#pragma unroll
  for (int k = 0; k < kChunk; ++k) v[k] = to_float(values[k]);
}

// v[k] = x[k] for k < count, 0 past that. Vector loads where the address allows; the values are the same either way.
template <class Float>
__device__ __forceinline__ void load_chunk(const Float* x, int64_t count, float (&v)[kChunk]) {
  if (count >= kChunk && is_aligned16(x)) {
    load_whole_chunk(x, v);
  } else {
#pragma unroll
    for (int k = 0; k < kChunk; ++k) v[k] = k < count ? to_float(x[k]) : 0.0f;
  }
}

// out[k] = v[k] for k < count, rounded to the type of out.
template <class Float>
__device__ __forceinline__ void store_chunk(Float* out, int64_t count, const float (&v)[kChunk]) {
  if (count >= kChunk && is_aligned16(out)) {
    alignas(16) Float values[kChunk];
#pragma unroll
    for (int k = 0; k < kChunk; ++k) values[k] = from_float<Float>(v[k]);
#pragma unroll
    for (int i = 0; i < int(sizeof(values) / 16); ++i)
      reinterpret_cast<uint4*>(out)[i] = reinterpret_cast<const uint4*>(values)[i];
  } else {
#pragma unroll
    for (int k = 0; k < kChunk; ++k)
      if (k < count) out[k] = from_float<Float>(v[k]);
  }
}

// The sum over a block of kThreads, the same in every thread: warp_sum, then the warps in order.
template <int kThreads>
__device__ __forceinline__ float block_sum(float x) {
  __shared__ float partial[kThreads / kWarp];
  x = warp_sum(x);
  if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = x;
  __syncthreads();
  float sum = partial[0];
#pragma unroll
  for (int w = 1; w < kThreads / kWarp; ++w) sum += partial[w];
  return sum;
}

template <class Unit>
__device__ __forceinline__ void copy_units(char* to, const char* from, int64_t num_bytes) {
  for (int64_t i = threadIdx.x; i < num_bytes / int64_t(sizeof(Unit)); i += blockDim.x)
    reinterpret_cast<Unit*>(to)[i] = reinterpret_cast<const Unit*>(from)[i];
}

// All threads of the block copy one row, in the widest unit that addresses and length (even) allow.
__device__ __forceinline__ void copy_row(char* to, const char* from, int64_t num_bytes) {
  const uint64_t alignment = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | uint64_t(num_bytes);
  if (alignment % 16 == 0)
    copy_units<uint4>(to, from, num_bytes);
  else if (alignment % 4 == 0)
    copy_units<uint32_t>(to, from, num_bytes);
  else
    copy_units<uint16_t>(to, from, num_bytes);
}

// All threads of the block set one row to NaN: what an index outside its array gives, since a kernel cannot raise.
__device__ __forceinline__ void poison_row(char* to, int64_t num_bytes) {
  for (int64_t i = threadIdx.x; i < num_bytes / 2; i += blockDim.x) reinterpret_cast<uint16_t*>(to)[i] = 0xffff;
}

inline int64_t element_bytes(Dtype dtype) { return dtype == kF32 ? 4 : 2; }

}  // namespace kdtree
