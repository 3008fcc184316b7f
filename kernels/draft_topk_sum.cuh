// CUDA: the logarithm of a row's sum of exponentials, from the sums of its 8 vocabulary segments.
#pragma once
#include "cuda_common.cuh"
#include "vocabulary.h"

namespace kdtree {

// largest: NaN where a logit is NaN or +inf, -inf where all are; then there is no sum.
struct RowSum {
  float largest, log_sum;

  __device__ __forceinline__ float log_prob(float logit) const {
    return largest == -INFINITY ? -INFINITY : __fsub_rn(__fsub_rn(logit, largest), log_sum);
  }
};

// Each segment's sum times exp(its largest - the row's largest), then ((0+1)+(2+3))+((4+5)+(6+7)). segment(s): of 8.
template <class Segment>
__device__ RowSum sum_of_row(Segment&& segment) {
  RowSum row{-INFINITY, 0.0f};
  bool invalid = false;
#pragma unroll
  for (int s = 0; s < 8; ++s) {
    const float largest = segment(s).largest;
    invalid |= isnan(largest);
    row.largest = fmaxf(row.largest, largest);
  }
  if (invalid) row.largest = NAN;
  if (invalid || row.largest == -INFINITY) return row;
  float sum[8];
#pragma unroll
  for (int s = 0; s < 8; ++s) {
    const SegmentSum part = segment(s);
    sum[s] = part.sum == 0.0f ? 0.0f : __fmul_rn(part.sum, expf(__fsub_rn(part.largest, row.largest)));
  }
  const float low = __fadd_rn(__fadd_rn(sum[0], sum[1]), __fadd_rn(sum[2], sum[3]));
  const float high = __fadd_rn(__fadd_rn(sum[4], sum[5]), __fadd_rn(sum[6], sum[7]));
  row.log_sum = float(log(double(__fadd_rn(low, high))));  // of at least 1
  return row;
}

}  // namespace kdtree
