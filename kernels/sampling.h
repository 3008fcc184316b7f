// Sampling of a token, the same on host and device to the last bit: noise as a function of (seed, position, token id),
// and what a row keeps by top_k and top_p.
//
// A token's noise is Gumbel's: g = -ln(-ln u). The token of largest logit / temperature + g is a draw from the softmax.
// u = (w + 1/2) / 2^32 for a word w of Philox4x32-10, so g is one of 2^32 values between -3.13 and 22.87.
#pragma once
#include <cstdint>
#include <cstring>

#include "op_args.h"

#ifdef __CUDACC__
#define KDTREE_SAMPLING __host__ __device__ __forceinline__
#else
#define KDTREE_SAMPLING inline
#endif

namespace kdtree {

constexpr int kMaxTopK = 1024;
constexpr float kMaxGumbel = 23.0f;     // above every g
constexpr float kMinTemperature = 0x1p-126f;
constexpr int kMassBits = 40;           // a probability relative to the row's largest, as a whole number of 2^-40

// How a row is sampled.
struct RowSampling {
  float inverse_temperature;  // 0: argmax
  float top_p;
  int top_k;                  // 0: all tokens, and then top_p is 1
  uint32_t key[2], position;  // of the noise; position of the token to be chosen
  bool valid;
};

KDTREE_SAMPLING bool is_temperature(float x) { return x == 0.0f || (x >= kMinTemperature && x <= 0x1.fffffep127f); }
KDTREE_SAMPLING bool is_top_k(int32_t k) { return k >= 0 && k <= kMaxTopK; }
KDTREE_SAMPLING bool is_top_p(float p) { return p > 0.0f && p <= 1.0f; }

template <class Args>  // SampleArgs or SampleAmongArgs
KDTREE_SAMPLING RowSampling row_sampling(const Args& a, int64_t row) {
  RowSampling r{};
  const int32_t s = a.stream[row];
  if (s < 0 || s >= a.num_streams || a.position[row] < 0) return r;
  const float temperature = a.temperature[s];
  const int32_t top_k = a.top_k[s];
  r.top_p = a.top_p[s];
  r.valid = is_temperature(temperature) && is_top_k(top_k) && is_top_p(r.top_p);
  r.inverse_temperature = temperature > 0.0f ? 1.0f / temperature : 0.0f;
  r.top_k = top_k == 0 && r.top_p < 1.0f ? kMaxTopK : top_k;
  if (r.top_k >= a.vocab_size) r.top_k = r.top_p < 1.0f ? int(a.vocab_size) : 0;
  const uint64_t seed = uint64_t(a.seed[s]);
  r.key[0] = uint32_t(seed);
  r.key[1] = uint32_t(seed >> 32);
  r.position = uint32_t(a.position[row]) + 1;
  return r;
}

// --- noise ---------------------------------------------------------------------------------------------------------

// One block of Philox4x32-10: tokens 4 `block` … 4 `block` + 3 take its words in order.
KDTREE_SAMPLING void philox(const RowSampling& r, uint32_t block, uint32_t (&word)[4]) {
  uint32_t x0 = block, x1 = r.position, x2 = 0, x3 = 0, key0 = r.key[0], key1 = r.key[1];
#ifdef __CUDACC__
#pragma unroll
#else
#pragma GCC unroll 10
#endif
  for (int turn = 0; turn < 10; ++turn) {
    const uint64_t product0 = uint64_t{0xD2511F53u} * x0, product1 = uint64_t{0xCD9E8D57u} * x2;
    x0 = uint32_t(product1 >> 32) ^ x1 ^ key0;
    x2 = uint32_t(product0 >> 32) ^ x3 ^ key1;
    x1 = uint32_t(product1);
    x3 = uint32_t(product0);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  word[0] = x0, word[1] = x1, word[2] = x2, word[3] = x3;
}

KDTREE_SAMPLING float fused(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

KDTREE_SAMPLING uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

KDTREE_SAMPLING float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// Both sides are computed: a branch would keep a compiler from making vectors of a loop.
KDTREE_SAMPLING float choose(bool condition, float yes, float no) {
  const uint32_t mask = 0u - uint32_t(condition);
  return float_of((bits_of(yes) & mask) | (bits_of(no) & ~mask));
}

// ln((1 + f) 2^exponent) for 1 + f in [1/sqrt 2, sqrt 2], to 2e-7 of the value and of f: f - f^2/2 + f^3 P(f).
KDTREE_SAMPLING float log_of(float f, float exponent) {
  float p = 7.149753891e-02f;
  p = fused(p, f, -1.157120073e-01f);
  p = fused(p, f, 1.166151107e-01f);
  p = fused(p, f, -1.241105068e-01f);
  p = fused(p, f, 1.424993653e-01f);
  p = fused(p, f, -1.666848024e-01f);
  p = fused(p, f, 2.000070748e-01f);
  p = fused(p, f, -2.499998905e-01f);
  p = fused(p, f, 3.333333119e-01f);
  const float square = f * f;
  const float log1p = f + fused(f * square, p, -0.5f * square);
  return fused(exponent, 0.693359375f, fused(exponent, -2.12194440e-4f, log1p));
}

// x = (1 + f) 2^exponent for a normal x > 0.
KDTREE_SAMPLING float split(float x, float& exponent) {
  const int32_t e = int32_t(bits_of(x) - 0x3f3504f3u) >> 23;
  exponent = float(e);
  return float_of(bits_of(x) - (uint32_t(e) << 23)) - 1.0f;
}

// -ln(-ln u), within 4e-7 of itself and 2e-7. u lies near 0 or, in the upper half, near 1: its distance from there is kept.
KDTREE_SAMPLING float gumbel(uint32_t word) {
  const bool upper = word >> 31;
  const float distance = (float(int32_t(word ^ (0u - (word >> 31)))) + 0.5f) * 0x1p-32f;  // at most 1/2
  const bool far = distance > 0.29289322f;
  float exponent;
  const float f = split(distance, exponent);
  const float from_one = choose(far, fused(-2.0f, distance, 1.0f), -distance);  // 1 - distance = (1 + this) 2^(-far)
  const float log_u = log_of(choose(upper, from_one, f), choose(upper, choose(far, -1.0f, 0.0f), exponent));
  const float f2 = split(-log_u, exponent);
  return -log_of(f2, exponent);
}

// A number that gumbel(word) never exceeds, for little work: with n leading ones in the word, 1 - u is at least 2^-(n+1),
// and so g <= -ln(1 - u) <= (n + 1) ln 2.
KDTREE_SAMPLING float gumbel_bound(uint32_t word) {
#ifdef __CUDA_ARCH__
  const int num_ones = __clz(int(~word));
#else
  const int num_ones = word == ~0u ? 32 : __builtin_clz(~word);
#endif
  return fused(float(num_ones), 0.69315f, 0.6933f);
}

KDTREE_SAMPLING float gumbel_of_token(const RowSampling& r, uint32_t id) {
  uint32_t word[4];
  philox(r, id / 4, word);
  const uint32_t low = id & 1 ? word[1] : word[0], high = id & 1 ? word[3] : word[2];
  return gumbel(id & 2 ? high : low);
}

// --- probabilities -------------------------------------------------------------------------------------------------

// (logit - largest) / temperature, never NaN: infinite logits that are the largest are as likely as each other.
KDTREE_SAMPLING float scaled_logit(const RowSampling& r, float logit, float largest) {
  return choose(logit == largest, 0.0f, (logit - largest) * r.inverse_temperature);
}

// e^scaled for scaled <= 0 in units of 2^-40, rounded down: sums are exact, so that their order does not matter.
KDTREE_SAMPLING uint64_t probability_mass(float scaled) {
  if (!(scaled > -28.0f)) return 0;
  const float n = float(int32_t(scaled * 1.44269504f - 0.5f));
  const float r = fused(n, 2.12194440e-4f, fused(n, -0.693359375f, scaled));
  float p = 1.0f / 5040;
  p = fused(p, r, 1.0f / 720);
  p = fused(p, r, 1.0f / 120);
  p = fused(p, r, 1.0f / 24);
  p = fused(p, r, 1.0f / 6);
  p = fused(p, r, 0.5f);
  p = fused(p, r, 1.0f);
  p = fused(p, r, 1.0f);
  return uint64_t(p * float_of(uint32_t(int32_t(n) + kMassBits + 127) << 23));
}

// The mass that the kept tokens must reach, of `total`: at least 1.
KDTREE_SAMPLING uint64_t wanted_mass(const RowSampling& r, uint64_t total) {
  const double product = double(r.top_p) * double(total);
  const uint64_t whole = uint64_t(product);
  const uint64_t wanted = whole + (double(whole) < product);
  return wanted > 0 ? wanted : 1;
}

}  // namespace kdtree
