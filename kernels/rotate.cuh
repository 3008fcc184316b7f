// One pair of a NeoX rotation. Each product and each sum is rounded in FP32, then the result to its type.
#pragma once
#include "cuda_common.cuh"

namespace kdtree {

// Elements i and i + half of x, turned by the i-th angle of cos_sin (`half` cosines, then `half` sines), to out.
template <class Float>
__device__ __forceinline__ void rotate_pair(const Float* x, const float* cos_sin, Float* out, int i, int half) {
  const float first = to_float(x[i]), second = to_float(x[i + half]);
  const float cosine = cos_sin[i], sine = cos_sin[i + half];
  out[i] = from_float<Float>(__fsub_rn(__fmul_rn(first, cosine), __fmul_rn(second, sine)));
  out[i + half] = from_float<Float>(__fadd_rn(__fmul_rn(second, cosine), __fmul_rn(first, sine)));
}

}  // namespace kdtree
