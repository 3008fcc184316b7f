// One head of a query or key, normalised and turned: rms_norm with the head's weights, then rope, each operation rounded
// in FP32 and the result once to its type.
//
// Order of additions: lane t of 8 adds the squares of elements t, t + 8, … by fma; the lanes are added across 4, 2, 1.
#pragma once
#include "cuda_common.cuh"

namespace kdtree {

constexpr int kHeadLanes = 8;  // neighbouring lanes that share a head

// All lanes of a warp call this, those without a head with x = nullptr. cos_sin: of the head's position. `out` may be FP32
// for a head of BF16: its values are rounded all the same.
template <class Float, class Stored>
__device__ __forceinline__ void norm_and_turn(const Float* x, const Float* weight, float eps, const float* cos_sin, int dim,
                                              Stored* out) {
  const int lane = threadIdx.x % kHeadLanes, half = dim / 2;
  float squares = 0.0f;
  if (x != nullptr) {
#pragma unroll 4
    for (int i = lane; i < dim; i += kHeadLanes) squares = __fmaf_rn(to_float(x[i]), to_float(x[i]), squares);
  }
#pragma unroll
  for (int offset = kHeadLanes / 2; offset > 0; offset /= 2)
    squares += __shfl_xor_sync(0xffffffffu, squares, offset);
  if (x == nullptr) return;
  const float scale = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(squares, float(dim)), eps)));
#pragma unroll 4
  for (int i = lane; i < half; i += kHeadLanes) {
    const float a = __fmul_rn(__fmul_rn(to_float(x[i]), scale), to_float(weight[i]));
    const float b = __fmul_rn(__fmul_rn(to_float(x[i + half]), scale), to_float(weight[i + half]));
    const float cosine = cos_sin[i], sine = cos_sin[i + half];
    const Float first = from_float<Float>(__fsub_rn(__fmul_rn(a, cosine), __fmul_rn(b, sine)));
    const Float second = from_float<Float>(__fadd_rn(__fmul_rn(b, cosine), __fmul_rn(a, sine)));
    if constexpr (sizeof(Stored) == sizeof(Float))
      out[i] = first, out[i + half] = second;
    else
      out[i] = to_float(first), out[i + half] = to_float(second);
  }
}

}  // namespace kdtree
