// sample_among on CUDA: a block a row. What top_k and top_p keep is the words from a threshold on, which is found bit by bit:
// counts and masses are integers, so nothing depends on an order.
#include "cuda_rows.cuh"
#include "sampling.h"
#include "vocabulary.h"

namespace kdtree {
namespace {

using Mass = unsigned long long;

constexpr int kThreads = 512;

// Words as unsigned numbers that rise as the words do; 0 stands for none.
__device__ __forceinline__ uint64_t rising_word(int64_t word) { return uint64_t(word) ^ (uint64_t{1} << 63); }
__device__ __forceinline__ int64_t word_of(uint64_t rising) { return int64_t(rising ^ (uint64_t{1} << 63)); }

struct Row {
  const int64_t* words;
  int num_words;
  float largest;
  RowSampling sampling;

  __device__ __forceinline__ float scaled(uint64_t rising) const {
    return scaled_logit(sampling, logit_of_word(word_of(rising)), largest);
  }
  template <class F>
  __device__ __forceinline__ void each(uint64_t least, F&& f) const {
    for (int i = threadIdx.x; i < num_words; i += kThreads) {
      const uint64_t rising = rising_word(words[i]);
      if (rising != 0 && rising >= least) f(rising);
    }
  }
};

// The sum or, if kLargest, the largest of every thread's value. `shared`: one place a warp.
template <bool kLargest>
__device__ Mass block_fold(Mass mine, Mass* shared) {
  const auto join = [](Mass a, Mass b) { return kLargest ? max(a, b) : a + b; };
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) mine = join(mine, __shfl_xor_sync(0xffffffffu, mine, offset));
  __syncthreads();
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = mine;
  __syncthreads();
  Mass all = shared[0];
#pragma unroll
  for (int w = 1; w < kThreads / kWarp; ++w) all = join(all, shared[w]);
  return all;
}

// The largest threshold, at least `least`, from which on the words weigh at least `wanted`; `least` if there is none.
template <class Weigh>
__device__ uint64_t find_least(const Row& row, uint64_t least, Mass wanted, Mass* shared, Weigh&& weigh) {
  uint64_t threshold = 0;
  for (int bit = 63; bit >= 0; --bit) {
    const uint64_t higher = threshold | uint64_t{1} << bit;
    Mass mine = 0;
    row.each(max(least, higher), [&](uint64_t rising) { mine += weigh(rising); });
    if (block_fold<false>(mine, shared) >= wanted) threshold = higher;
  }
  return max(threshold, least);
}

__device__ uint64_t least_kept(const Row& row, Mass* shared) {
  if (row.sampling.top_k == 0) return 0;
  const uint64_t least = find_least(row, 0, row.sampling.top_k, shared, [](uint64_t) { return Mass(1); });
  if (row.sampling.top_p == 1.0f) return least;
  const auto mass_of = [&](uint64_t rising) { return Mass(probability_mass(row.scaled(rising))); };
  Mass mine = 0;
  row.each(least, [&](uint64_t rising) { mine += mass_of(rising); });
  const Mass total = block_fold<false>(mine, shared);
  return find_least(row, least, wanted_mass(row.sampling, total), shared, mass_of);
}

// The word of largest score from `least` on: equal scores, the lower id.
__device__ uint64_t best_scored(const Row& row, uint64_t least, Mass* shared) {
  Mass best = 0;
  uint64_t word = 0;
  row.each(least, [&](uint64_t rising) {
    const uint32_t id = id_of_word(word_of(rising));
    const Mass key = rising_word(make_word(__fadd_rn(row.scaled(rising), gumbel_of_token(row.sampling, id)), id));
    if (key > best) best = key, word = rising;
  });
  const Mass best_of_all = block_fold<true>(best, shared);
  return block_fold<true>(best == best_of_all ? word : 0, shared);
}

__global__ void __launch_bounds__(kThreads) sample_among_kernel(SampleAmongArgs a) {
  wait_for_previous_kernel();
  allow_next_kernel();
  __shared__ Mass shared[kThreads / kWarp];
  const int64_t t = blockIdx.x;
  if (t >= rows_in_use(a.num_rows_device, a.num_rows)) return;
  const Row row{a.words + t * a.num_words, int(a.num_words), a.largest[t], row_sampling(a, t)};
  uint64_t best = 0;
  row.each(0, [&](uint64_t rising) { best = max(best, rising); });
  best = block_fold<true>(best, shared);
  const bool is_nan = !row.sampling.valid || isnan(row.largest) || best == rising_word(kNanWord);
  const bool is_greedy = row.sampling.inverse_temperature == 0.0f || row.largest == -INFINITY || best == 0;
  if (!is_nan && !is_greedy) best = best_scored(row, least_kept(row, shared), shared);
  if (threadIdx.x == 0) a.word[t] = is_nan ? kNanWord : word_of(best);
}

}  // namespace

int sample_among_cuda(const SampleAmongArgs& a, void* stream) {
  if (a.num_words > INT32_MAX / 2) return kUnsupported;
  if (a.num_rows == 0) return kOk;
  return launch(sample_among_kernel, {dim3(a.num_rows), dim3(kThreads), 0, 1, Start::kEarly}, stream, a);
}

}  // namespace kdtree
