// 16 floats as one value: AVX-512, AVX2 with FMA, or plain arrays that the compiler may vectorise. Every form does the
// same IEEE operations lane by lane (fma is always fused), so a kernel written with it has one order of additions.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "bf16.h"

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#include <immintrin.h>
#endif

namespace kdtree {

constexpr int kLanes = 16;

#if defined(__AVX512F__)

struct Vec16 {
  __m512 v;

  static Vec16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Vec16 load(const Bf16* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
  }
  static Vec16 all(float x) { return {_mm512_set1_ps(x)}; }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
};

inline Vec16 operator+(Vec16 a, Vec16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec16 operator-(Vec16 a, Vec16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec16 operator*(Vec16 a, Vec16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec16 operator/(Vec16 a, Vec16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec16 fma(Vec16 a, Vec16 b, Vec16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// The larger (smaller) lane; where either is NaN, the lane of b.
inline Vec16 max(Vec16 a, Vec16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec16 min(Vec16 a, Vec16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec16 round_to_int(Vec16 a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// 2^n for whole n in -126 … 127.
inline Vec16 exp2_int(Vec16 n) {
  const __m512i bits = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(bits, 23))};
}
// Lanes below `count` from a, the others from b.
inline Vec16 first_lanes(int64_t count, Vec16 a, Vec16 b) {
  const __mmask16 mask = count >= kLanes ? 0xffff : count <= 0 ? 0 : __mmask16((1u << count) - 1);
  return {_mm512_mask_blend_ps(mask, b.v, a.v)};
}
inline bool any_nan(Vec16 a) { return _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q) != 0; }

// Sum of the lanes: lane i + lane i+8, then +4, +2, +1.
inline float sum_lanes(Vec16 a) {
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(a.v),
                                    _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1)));
  const __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  const __m128 pair = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}

// Lane j of the result is sum_lanes(rows[j]), added in the same order: halves of two rows share a vector at each level.
inline Vec16 sum_lanes_of_16(const Vec16 (&rows)[kLanes]) {
  __m512 a[8], b[4], c[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)  // row i in lanes 0-7, row i+8 in lanes 8-15
    a[i] = _mm512_add_ps(_mm512_shuffle_f32x4(rows[i].v, rows[i + 8].v, 0x44),
                         _mm512_shuffle_f32x4(rows[i].v, rows[i + 8].v, 0xee));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)  // 128-bit parts: rows i, i+4, i+8, i+12
    b[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a[i], a[i + 4], 0x88), _mm512_shuffle_f32x4(a[i], a[i + 4], 0xdd));
  // parts are now in the order i, i+8, i+4, i+12
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i)  // within a part: lanes 0,1 of row i, then of row i+2
    c[i] = _mm512_add_ps(_mm512_shuffle_ps(b[i], b[i + 2], 0x44), _mm512_shuffle_ps(b[i], b[i + 2], 0xee));
  const __m512 d = _mm512_add_ps(_mm512_shuffle_ps(c[0], c[1], 0x88), _mm512_shuffle_ps(c[0], c[1], 0xdd));
  // part p holds, of base row r(p) in {0, 8, 4, 12}: rows r, r+2, r+1, r+3
  const __m512i order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
  return {_mm512_permutexvar_ps(order, d)};
}

inline float max_lanes(Vec16 a) { return _mm512_reduce_max_ps(a.v); }  // no lane is NaN

inline void store_rounded(Vec16 a, Bf16* p) {
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  const __m512i high = _mm512_mask_mov_epi32(_mm512_srli_epi32(rounded, 16), nan, _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(high));
}

#else  // AVX2 and plain share what is not worth intrinsics

#if defined(__AVX2__) && defined(__FMA__)

struct Vec16 {
  __m256 lo, hi;

  static Vec16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static Vec16 load(const Bf16* p) { return {widen8(p), widen8(p + 8)}; }
  static Vec16 all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  void store(float* p) const {
    _mm256_storeu_ps(p, lo);
    _mm256_storeu_ps(p + 8, hi);
  }

 private:
  static __m256 widen8(const Bf16* p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  }
};

#define KDTREE_VEC16_OP(name, intrinsic) \
  inline Vec16 name(Vec16 a, Vec16 b) { return {intrinsic(a.lo, b.lo), intrinsic(a.hi, b.hi)}; }
KDTREE_VEC16_OP(operator+, _mm256_add_ps)
KDTREE_VEC16_OP(operator-, _mm256_sub_ps)
KDTREE_VEC16_OP(operator*, _mm256_mul_ps)
KDTREE_VEC16_OP(operator/, _mm256_div_ps)
KDTREE_VEC16_OP(max, _mm256_max_ps)
KDTREE_VEC16_OP(min, _mm256_min_ps)
#undef KDTREE_VEC16_OP

inline Vec16 fma(Vec16 a, Vec16 b, Vec16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline Vec16 round_to_int(Vec16 a) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, mode), _mm256_round_ps(a.hi, mode)};
}
inline Vec16 exp2_int(Vec16 n) {
  const auto half = [](__m256 x) {
    const __m256i bits = _mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 23));
  };
  return {half(n.lo), half(n.hi)};
}

#else

struct Vec16 {
  float v[kLanes];

  template <class Float>
  static Vec16 load(const Float* p) {
    Vec16 out;
    for (int i = 0; i < kLanes; ++i) out.v[i] = widen(p[i]);
    return out;
  }
  static Vec16 all(float x) {
    Vec16 out;
    for (int i = 0; i < kLanes; ++i) out.v[i] = x;
    return out;
  }
  void store(float* p) const { std::memcpy(p, v, sizeof v); }
};

#define KDTREE_VEC16_OP(name, expression)                      \
  inline Vec16 name(Vec16 a, Vec16 b) {                        \
    for (int i = 0; i < kLanes; ++i) {                         \
      const float x = a.v[i], y = b.v[i];                      \
      a.v[i] = expression;                                     \
    }                                                          \
    return a;                                                  \
  }
KDTREE_VEC16_OP(operator+, x + y)
KDTREE_VEC16_OP(operator-, x - y)
KDTREE_VEC16_OP(operator*, x * y)
KDTREE_VEC16_OP(operator/, x / y)
KDTREE_VEC16_OP(max, x > y ? x : y)
KDTREE_VEC16_OP(min, x < y ? x : y)
#undef KDTREE_VEC16_OP

inline Vec16 fma(Vec16 a, Vec16 b, Vec16 c) {
  for (int i = 0; i < kLanes; ++i) c.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
  return c;
}
inline Vec16 round_to_int(Vec16 a) {
  for (int i = 0; i < kLanes; ++i) a.v[i] = __builtin_nearbyintf(a.v[i]);
  return a;
}
inline Vec16 exp2_int(Vec16 n) {
  for (int i = 0; i < kLanes; ++i) {
    const uint32_t bits = n.v[i] == n.v[i] ? uint32_t(int32_t(n.v[i]) + 127) << 23 : 0x7fc00000u;
    std::memcpy(&n.v[i], &bits, sizeof bits);
  }
  return n;
}

#endif

inline Vec16 first_lanes(int64_t count, Vec16 a, Vec16 b) {
  float x[kLanes], y[kLanes];
  a.store(x);
  b.store(y);
  for (int i = 0; i < kLanes; ++i) x[i] = i < count ? x[i] : y[i];
  return Vec16::load(x);
}

inline bool any_nan(Vec16 a) {
  float x[kLanes];
  a.store(x);
  bool found = false;
  for (int i = 0; i < kLanes; ++i) found |= x[i] != x[i];
  return found;
}

inline float sum_lanes(Vec16 a) {
  float x[kLanes];
  a.store(x);
  for (int width = kLanes / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) x[i] += x[i + width];
  return x[0];
}

inline Vec16 sum_lanes_of_16(const Vec16 (&rows)[kLanes]) {
  float sums[kLanes];
  for (int i = 0; i < kLanes; ++i) sums[i] = sum_lanes(rows[i]);
  return Vec16::load(sums);
}

inline float max_lanes(Vec16 a) {
  float x[kLanes];
  a.store(x);
  for (int width = kLanes / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) x[i] = x[i] > x[i + width] ? x[i] : x[i + width];
  return x[0];
}

inline void store_rounded(Vec16 a, Bf16* p) {
  float x[kLanes];
  a.store(x);
  for (int i = 0; i < kLanes; ++i) p[i] = round_bf16(x[i]);
}

#endif

inline void store_rounded(Vec16 a, float* p) { a.store(p); }

// The first `count` lanes from memory, zeros in the others; nothing past `count` is read.
template <class Float>
inline Vec16 load_first(const Float* p, int64_t count) {
  if (count >= kLanes) return Vec16::load(p);
  Float padded[kLanes] = {};
  std::memcpy(padded, p, count * sizeof(Float));
  return Vec16::load(padded);
}

// The first `count` lanes to memory, rounded to its type.
template <class Float>
inline void store_first(Vec16 a, Float* p, int64_t count) {
  if (count >= kLanes) return store_rounded(a, p);
  Float padded[kLanes];
  store_rounded(a, padded);
  std::memcpy(p, padded, count * sizeof(Float));
}

// Round every lane to the storage type and widen again.
inline Vec16 rounded(Vec16 a, const float*) { return a; }
inline Vec16 rounded(Vec16 a, const Bf16*) {
  Bf16 stored[kLanes];
  store_rounded(a, stored);
  return Vec16::load(stored);
}

// e^x within 1.5 ulp, correct at ±inf and NaN, gradual underflow; bodies and tails of all kernels use this one form.
// x = n ln 2 + r with |r| <= ln 2 / 2; e^r by a polynomial of degree 7; times 2^n in two factors, as n may be -150.
inline Vec16 exp(Vec16 x) {
  x = max(Vec16::all(-104.0f), x);
  x = min(Vec16::all(89.0f), x);
  const Vec16 n = round_to_int(x * Vec16::all(1.44269504f));
  Vec16 r = fma(n, Vec16::all(-0.693359375f), x);
  r = fma(n, Vec16::all(2.12194440e-4f), r);
  Vec16 p = Vec16::all(1.98412698e-4f);
  p = fma(p, r, Vec16::all(1.38888889e-3f));
  p = fma(p, r, Vec16::all(8.33333333e-3f));
  p = fma(p, r, Vec16::all(4.16666667e-2f));
  p = fma(p, r, Vec16::all(1.66666667e-1f));
  p = fma(p, r, Vec16::all(0.5f));
  p = fma(p, r, Vec16::all(1.0f));
  p = fma(p, r, Vec16::all(1.0f));
  const Vec16 half = round_to_int(n * Vec16::all(0.5f));
  return p * exp2_int(half) * exp2_int(n - half);
}

}  // namespace kdtree
