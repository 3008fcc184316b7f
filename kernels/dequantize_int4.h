// One value of an INT4 weight: what both devices compute.
#pragma once
#include <cstdint>

#if defined(__CUDACC__)
#define KDTREE_BOTH __host__ __device__ __forceinline__
#else
#define KDTREE_BOTH inline
#endif

namespace kdtree {

constexpr int kInt4PerWord = 8;

// The value -8 … 7 of input k in a row of words.
KDTREE_BOTH int int4_at(const int32_t* row, int64_t k) {
  return int(uint32_t(row[k / kInt4PerWord]) >> (4 * (k % kInt4PerWord)) & 15u) - 8;
}

}  // namespace kdtree
