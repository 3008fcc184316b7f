// bfloat16 as it lies in memory: the upper 16 bits of an FP32. Widening is exact; narrowing rounds to nearest even.
#pragma once
#include <cstdint>
#include <cstring>

namespace kdtree {

struct Bf16 {
  uint16_t bits;
};

inline float widen(float x) { return x; }

inline float widen(Bf16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

inline Bf16 round_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fc0};  // NaN stays NaN
  return {uint16_t((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16)};
}

// Round an FP32 value to the storage type.
template <class Float>
inline Float narrow(float x);
template <>
inline float narrow<float>(float x) { return x; }
template <>
inline Bf16 narrow<Bf16>(float x) { return round_bf16(x); }

}  // namespace kdtree
