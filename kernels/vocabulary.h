// What ranks tell each other about their parts of a vocabulary: words of 64 bits that can be compared as integers. Python:
// kdtree_nb.parallel.vocabulary.
#pragma once
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define KDTREE_WORDS __host__ __device__ __forceinline__
#else
#define KDTREE_WORDS inline
#endif

namespace kdtree {

constexpr int64_t kNoWord = INT64_MIN;   // stands for no token; below all words
constexpr int64_t kNanWord = INT64_MAX;  // stands for a NaN among a row's logits; above all words

KDTREE_WORDS int32_t word_bits(float x) {
  int32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

KDTREE_WORDS float word_float(int32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// The word of a logit that is no NaN and its id: larger for a larger logit, of equal ones for the lower id.
KDTREE_WORDS int64_t make_word(float logit, uint32_t id) {
  const int32_t bits = word_bits(logit + 0.0f), rising = bits ^ (bits >> 31 & 0x7fffffff);
  return int64_t(uint64_t(uint32_t(rising)) << 32 | uint32_t(~id));
}

KDTREE_WORDS uint32_t id_of_word(int64_t word) { return ~uint32_t(word); }

KDTREE_WORDS float logit_of_word(int64_t word) {
  const int32_t rising = int32_t(word >> 32);
  return word_float(rising ^ (rising >> 31 & 0x7fffffff));
}

// A vocabulary segment of a row: the largest logit, NaN if one is NaN or +inf, and the sum of exp(logit - largest), 0 where
// all are -inf.
struct SegmentSum {
  float largest, sum;
};

KDTREE_WORDS int64_t make_word(const SegmentSum& s) {
  return int64_t(uint64_t(uint32_t(word_bits(s.largest))) << 32 | uint32_t(word_bits(s.sum)));
}

KDTREE_WORDS SegmentSum segment_of_word(int64_t word) {
  return {word_float(int32_t(uint64_t(word) >> 32)), word_float(int32_t(word))};
}

}  // namespace kdtree
