// CPU: the logarithm of a row's sum of exponentials, from the sums of its 8 vocabulary segments.
#pragma once
#include <algorithm>
#include <limits>

#include "segments.h"
#include "vec16.h"
#include "vocabulary.h"

namespace kdtree {

// ln(x) for finite x >= 1, and never below 0: x = m 2^e with m in [1/sqrt 2, sqrt 2); ln m = 2 artanh((m-1)/(m+1)).
inline float log_from_one(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const int32_t exponent = int32_t(bits - 0x3f3504f3u) >> 23;
  bits -= uint32_t(exponent) << 23;
  float m;
  std::memcpy(&m, &bits, sizeof m);
  const double z = (double(m) - 1.0) / (double(m) + 1.0), z2 = z * z;
  double series = 1.0 / 15;
  for (int k = 13; k > 0; k -= 2) series = __builtin_fma(series, z2, 1.0 / k);
  return float(__builtin_fma(double(exponent), 0.69314718055994531, 2.0 * z * series));
}

// largest: NaN where a logit is NaN or +inf, -inf where all are; then there is no sum.
struct RowSum {
  float largest, log_sum;

  float log_prob(float logit) const {
    return largest == -std::numeric_limits<float>::infinity() ? largest : (logit - largest) - log_sum;
  }
};

// Each segment's sum times exp(its largest - the row's largest), then ((0+1)+(2+3))+((4+5)+(6+7)).
inline RowSum sum_of_row(const SegmentSum (&segments)[kNumSegments]) {
  float largest = -std::numeric_limits<float>::infinity();
  for (const SegmentSum& s : segments) {
    if (s.largest != s.largest) return {s.largest, 0.0f};
    largest = std::max(largest, s.largest);
  }
  if (largest == -std::numeric_limits<float>::infinity()) return {largest, 0.0f};
  alignas(64) float scale[kLanes] = {};
  for (int s = 0; s < kNumSegments; ++s) scale[s] = segments[s].largest - largest;
  exp(Vec16::load(scale)).store(scale);
  float sum[kNumSegments];
  for (int s = 0; s < kNumSegments; ++s) sum[s] = segments[s].sum == 0.0f ? 0.0f : segments[s].sum * scale[s];
  return {largest, log_from_one(((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7])))};
}

}  // namespace kdtree
