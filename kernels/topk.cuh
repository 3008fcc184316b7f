// Thresholds among ordered keys, for kernels that need the largest of many: bit by bit where counting is cheap, digit by
// digit where keys are at hand.
#pragma once
#include <type_traits>

#include "cuda_common.cuh"
#include "ordered_bits.cuh"

namespace kdtree {

// Rises with the logit, then falls with the id: larger is better. Never 0.
__device__ __forceinline__ uint64_t make_key(float logit, int64_t id, int id_bits) {
  return uint64_t(rising_bits(logit)) << id_bits | ((uint64_t{1} << id_bits) - 1 - uint64_t(id));
}

// Counts over the block with one barrier each: three counters take turns.
struct BlockCounter {
  int* counters;  // [3], the first one zero
  int turn;

  __device__ int count(int mine) {
    const int sum = __reduce_add_sync(0xffffffffu, mine);
    const int next = turn == 2 ? 0 : turn + 1;
    if (threadIdx.x % kWarp == 0 && sum) atomicAdd(&counters[turn], sum);
    if (threadIdx.x == 0) counters[next] = 0;
    __syncthreads();
    const int total = counters[turn];
    turn = next;
    return total;
  }
};

// The largest threshold of `bits` bits with at least `wanted` keys at or above it, or any with exactly `wanted`; its
// lowest `free_bits` are 0. num_above(t) counts the block's keys >= t. 0 if there are fewer keys.
template <class Key, class NumAbove>
__device__ Key find_threshold(int wanted, int bits, int free_bits, NumAbove&& num_above) {
  Key threshold = 0;
  for (int bit = bits - 1; bit >= free_bits; --bit) {
    const Key higher = threshold | Key(1) << bit;
    const int total = num_above(higher);
    if (total >= wanted) threshold = higher;
    if (total == wanted) break;
  }
  return threshold;
}

constexpr int kBins = 256, kDigitBits = 8;

// The weights of the keys that agree down to a digit, by that digit; then which digit was chosen.
template <class Weight>
struct DigitBins {
  Weight bins[kBins], above, within;  // weight of the keys above the digit, and of those that have it
  int digit;
};

// One warp: the digit at which the weight of the keys from the largest on reaches `wanted`.
template <class Weight>
__device__ void find_digit(DigitBins<Weight>& s, Weight wanted, int lane) {
  Weight mine = 0;
  for (int j = 0; j < kBins / kWarp; ++j) mine += s.bins[kBins - 1 - lane * (kBins / kWarp) - j];
  Weight up_to = mine;
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const Weight other = __shfl_up_sync(0xffffffffu, up_to, offset);
    if (lane >= offset) up_to += other;
  }
  Weight above = up_to - mine;
  if (above >= wanted || up_to < wanted) return;  // not this lane's digits
  int digit = kBins - 1 - lane * (kBins / kWarp);
  while (above + s.bins[digit] < wanted) above += s.bins[digit--];
  s.digit = digit;
  s.above = above;
  s.within = s.bins[digit];
}

// The largest threshold such that the block's distinct keys at or above it weigh at least `wanted`, which they do in all:
// digit by digit from bit `top` on; above it all keys agree. visit(f) calls f(key, weight) for this thread's keys. An int
// weight is 1 for each key, and then the search ends as soon as exactly `wanted` keys are known to lie above.
template <int kThreads, class Weight, class VisitKeys>
__device__ uint64_t select_threshold(DigitBins<Weight>& s, Weight wanted, int top, uint64_t any_key,
                                     VisitKeys&& visit) {
  constexpr bool kCounts = std::is_same_v<Weight, int>;
  int shift = top + 1;
  uint64_t prefix = any_key >> shift;
  while (shift > 0) {
    const int width = min(kDigitBits, shift);
    for (int i = threadIdx.x; i < kBins; i += kThreads) s.bins[i] = 0;
    __syncthreads();
    visit([&](uint64_t key, Weight weight) {
      if (key >> shift == prefix) atomicAdd(&s.bins[(key >> (shift - width)) & ((1 << width) - 1)], weight);
    });
    __syncthreads();
    if (threadIdx.x < kWarp) find_digit(s, wanted, threadIdx.x);
    __syncthreads();
    shift -= width;
    prefix = prefix << width | uint64_t(s.digit);
    wanted -= s.above;
    if (kCounts && wanted == s.within) break;
  }
  return prefix << shift;
}

}  // namespace kdtree
