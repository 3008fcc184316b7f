// The K largest logits of a row, best first: the first pass finds the maximum of every block of 64 logits, and only blocks
// that can hold one of the K are looked into.
#pragma once
#include <algorithm>
#include <functional>
#include <limits>
#include <vector>

#include "vec16.h"

namespace kdtree {

constexpr int64_t kTopkBlock = 4 * kLanes;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Orders by falling logit, then by rising id, when compared as an integer. +0 and -0 are equal logits.
inline uint64_t make_key(float logit, int64_t id) {
  uint32_t bits;
  logit += 0.0f;
  std::memcpy(&bits, &logit, sizeof bits);
  const uint32_t rising = (bits >> 31) ? ~bits : bits | 0x80000000u;
  return uint64_t(~rising) << 32 | uint64_t(id);
}

inline float logit_of(uint64_t key) {
  const uint32_t rising = ~uint32_t(key >> 32);
  const uint32_t bits = (rising >> 31) ? rising & 0x7fffffffu : ~rising;
  float logit;
  std::memcpy(&logit, &bits, sizeof logit);
  return logit;
}

template <class Float>
inline Vec16 load_padded(const Float* logits, int64_t count) {
  if (count >= kLanes) return Vec16::load(logits);
  return first_lanes(count, load_first(logits, count), Vec16::all(-kInfinity));
}

struct TopkScratch {
  std::vector<float> block_max, sorted;
  std::vector<uint64_t> keys;
};

// Fills block_max and returns the maximum of the row; NaN if a logit is NaN.
template <class Float>
inline float find_maxima(const Float* logits, int64_t vocab_size, std::vector<float>& block_max) {
  bool nan = false;
  float row_max = -kInfinity;
  block_max.clear();
  for (int64_t begin = 0; begin < vocab_size; begin += kTopkBlock) {
    const int64_t end = std::min(begin + kTopkBlock, vocab_size);
    Vec16 largest = Vec16::all(-kInfinity);
    for (int64_t i = begin; i < end; i += kLanes) {
      const Vec16 x = load_padded(logits + i, end - i);
      nan |= any_nan(x);
      largest = max(x, largest);
    }
    block_max.push_back(max_lanes(largest));
    row_max = std::max(row_max, block_max.back());
  }
  return nan ? std::numeric_limits<float>::quiet_NaN() : row_max;
}

inline void keep_smallest(std::vector<uint64_t>& keys, int64_t count) {
  if (int64_t(keys.size()) <= count) return;
  std::nth_element(keys.begin(), keys.begin() + (count - 1), keys.end());
  keys.resize(count);
}

// The keys of the K largest logits, best first. With at least K blocks, the K-th largest block maximum bounds the K-th
// largest logit from below.
template <class Float>
inline void find_largest(const Float* logits, int64_t vocab_size, int64_t num_candidates, TopkScratch& scratch) {
  float bound = -kInfinity;
  const int64_t num_blocks = int64_t(scratch.block_max.size());
  if (num_blocks >= num_candidates) {
    scratch.sorted = scratch.block_max;
    const auto kth = scratch.sorted.begin() + (num_candidates - 1);
    std::nth_element(scratch.sorted.begin(), kth, scratch.sorted.end(), std::greater<float>());
    bound = *kth;
  }
  auto& keys = scratch.keys;
  keys.clear();
  for (int64_t block = 0; block < num_blocks; ++block) {
    if (!(scratch.block_max[block] >= bound)) continue;
    const int64_t begin = block * kTopkBlock, end = std::min(begin + kTopkBlock, vocab_size);
    for (int64_t i = begin; i < end; ++i) {
      const float logit = widen(logits[i]);
      if (logit >= bound) keys.push_back(make_key(logit, i));
    }
    if (int64_t(keys.size()) > 4 * num_candidates + 4096) keep_smallest(keys, num_candidates);  // many equal logits
  }
  keep_smallest(keys, num_candidates);
  std::sort(keys.begin(), keys.end());
}

}  // namespace kdtree
