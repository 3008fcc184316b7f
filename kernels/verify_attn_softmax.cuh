// The softmax of verify_attn with tensor cores: a query's maximum and sum while its keys pass, the same in the four lanes
// that share the query.
#pragma once
#include "mma_bf16.cuh"

namespace kdtree {

constexpr float kLazyMaximum = 8.0f;

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// Scores are in log2. `maximum` is at most 8 below the largest score so far, and moves only when it would be more.
struct RowMaximum {
  float maximum = -INFINITY, sum = 0.0f;

  // Takes the largest score of a tile, the first one of a leaf if `fresh`; returns the factor for all sums so far.
  __device__ __forceinline__ float move(float largest, bool fresh) {
    maximum = fresh ? -INFINITY : maximum;
    const bool grows = largest > __fadd_rn(maximum, kLazyMaximum);  // always, in a fresh leaf
    const float alpha = grows && !fresh ? exp2_approx(__fsub_rn(maximum, largest)) : 1.0f;
    maximum = grows ? largest : maximum;
    sum = fresh ? 0.0f : __fmul_rn(sum, alpha);
    return alpha;
  }
};

}  // namespace kdtree
