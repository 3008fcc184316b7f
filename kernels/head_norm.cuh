// One head of a query or key, normalised and turned: rms_norm with the head's weights, then rope, each operation rounded
// in FP32 and the result once to its type.
//
// Order of additions: lane t of 8 adds the squares of elements i and i + dim / 2 by fma, i = t, t + 8, …; the lanes are
// added across 4, 2, 1.
#pragma once
#include "cuda_common.cuh"

namespace kdtree {

constexpr int kHeadLanes = 8;  // neighbouring lanes that share a head

// All lanes of a warp call this, those without a head with x = nullptr. dim is at most 2 * kHeadLanes * kPairs: everything
// is loaded before anything is waited for. cos_sin: of the head's position. `out` may be FP32 for a head of BF16: its
// values are rounded all the same.
template <int kPairs, class Float, class Stored>
__device__ __forceinline__ void norm_and_turn(const Float* x, const Float* weight, float eps, const float* cos_sin, int dim,
                                              Stored* out) {
  const int lane = threadIdx.x % kHeadLanes, half = dim / 2;
  float first[kPairs], second[kPairs], cosine[kPairs], sine[kPairs];
  Float weights[kPairs][2];
  float squares = 0.0f;
#pragma unroll
  for (int p = 0; p < kPairs; ++p) {
    const int i = lane + p * kHeadLanes;
    first[p] = second[p] = 0.0f;
    if (x == nullptr || i >= half) continue;
    first[p] = to_float(x[i]), second[p] = to_float(x[i + half]);
    weights[p][0] = weight[i], weights[p][1] = weight[i + half];
    cosine[p] = cos_sin[i], sine[p] = cos_sin[i + half];
  }
#pragma unroll
  for (int p = 0; p < kPairs; ++p)
    squares = __fmaf_rn(second[p], second[p], __fmaf_rn(first[p], first[p], squares));
#pragma unroll
  for (int offset = kHeadLanes / 2; offset > 0; offset /= 2)
    squares += __shfl_xor_sync(0xffffffffu, squares, offset);
  if (x == nullptr) return;
  const float scale = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(squares, float(dim)), eps)));
#pragma unroll
  for (int p = 0; p < kPairs; ++p) {
    const int i = lane + p * kHeadLanes;
    if (i >= half) continue;
    const float a = __fmul_rn(__fmul_rn(first[p], scale), to_float(weights[p][0]));
    const float b = __fmul_rn(__fmul_rn(second[p], scale), to_float(weights[p][1]));
    const Float low = from_float<Float>(__fsub_rn(__fmul_rn(a, cosine[p]), __fmul_rn(b, sine[p])));
    const Float high = from_float<Float>(__fadd_rn(__fmul_rn(b, cosine[p]), __fmul_rn(a, sine[p])));
    if constexpr (sizeof(Stored) == sizeof(Float))
      out[i] = low, out[i + half] = high;
    else
      out[i] = to_float(low), out[i + half] = to_float(high);
  }
}

}  // namespace kdtree
