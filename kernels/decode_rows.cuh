// Rows of x in the shared memory of decode_layers: normed, or as they lie in memory.
#pragma once
#include "decode_work.cuh"
#include "norm_row.cuh"

namespace kdtree {

// to[r, :] = from[r, :] for rows of num_in values, a multiple of 8, at strides in bytes. All threads.
__device__ __forceinline__ void copy_rows(unsigned char* to, int to_pitch, const Bf16* from, int64_t from_stride, int num_rows,
                                          int num_in) {
  const int chunks = num_in / 8;
#pragma unroll 1
  for (int i = threadIdx.x; i < num_rows * chunks; i += kDecodeThreads) {
    const int row = i / chunks, chunk = i - row * chunks;
    const uint4 value = __ldcg(reinterpret_cast<const uint4*>(from + row * from_stride) + chunk);
    *reinterpret_cast<uint4*>(to + row * to_pitch + chunk * 16) = value;
  }
}

using DecodeNorm = RowNorm<true, Bf16>;

// Norms rows into shared memory; their weight has been read. All threads, which have met when it returns.
__device__ __forceinline__ void norm_rows(DecodeNorm& norm, unsigned char* to, const Bf16* x, int64_t x_stride, int num_rows, int dim,
                                          float eps) {
#pragma unroll 1
  for (int row = 0; row < num_rows; ++row) {
    norm.read_row(x + row * x_stride);
    norm.write(reinterpret_cast<Bf16*>(to + row * row_pitch(dim)), eps);
    __syncthreads();
  }
}

}  // namespace kdtree
