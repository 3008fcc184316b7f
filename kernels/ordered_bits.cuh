// Floats as unsigned integers that compare alike.
#pragma once
#include <cstdint>

namespace kdtree {

// Rises with x, which must not be NaN; +0 and -0 are equal. -inf gives 0x007fffff, so 0 lies below every float.
__device__ __forceinline__ uint32_t rising_bits(float x) {
  const uint32_t bits = __float_as_uint(__fadd_rn(x, 0.0f));
  return (bits >> 31) ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float from_rising_bits(uint32_t rising) {
  return __uint_as_float((rising >> 31) ? rising & 0x7fffffffu : ~rising);
}

}  // namespace kdtree
