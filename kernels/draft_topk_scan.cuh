// The first kernel of draft_topk: the candidates of each vocabulary segment of a row, its maximum and sum. What it hands
// on to the second (draft_topk_select.cuh) is declared here too.
#pragma once
#include "cuda_rows.cuh"
#include "topk.cuh"

namespace kdtree {
namespace {

constexpr int kSegments = 8, kScanThreads = 512;
constexpr int kCapacity = 2048;       // candidates of one segment that `scan` may hand on
constexpr int kBoundBits = 16;        // of the FP32 that bounds the K-th largest: sign, exponent, 7 bits of mantissa

struct SegmentResult {
  float maximum, sum;  // of logits; of exp(logit - maximum)
  int count;           // candidates
  int invalid;         // a NaN or +inf
};

struct Workspace {
  SegmentResult* results;  // [rows, 8]
  uint64_t* keys;          // [rows, 8, kCapacity]
  int id_bits;             // that hold every id
};

int64_t results_bytes(int64_t num_rows) {
  return ceil_div(num_rows * kSegments * int64_t(sizeof(SegmentResult)), 256) * 256;
}

// Begin of segment s of V logits: units of 32, as segments.h cuts every reduction.
__device__ __forceinline__ int64_t segment_begin(int64_t vocab_size, int s) {
  return min(32 * (s * ((vocab_size + 31) / 32) / kSegments), vocab_size);
}

// The same where the logits are a share of the vocabulary: counted from the first of them, other ranks' segments are empty.
__device__ __forceinline__ int64_t logits_begin(const DraftTopkArgs& a, int s) {
  if (a.num_segments == 0) return segment_begin(a.vocab_size, s);
  const int mine = min(max(s, a.first_segment), a.first_segment + a.num_segments);
  return segment_begin(a.whole_vocab, mine) - segment_begin(a.whole_vocab, a.first_segment);
}

// Visits the logits of this thread in [begin, end): chunks of 8, kScanThreads apart. visit(value, id, place in chunk).
template <class Float, class Visit>
__device__ __forceinline__ void for_each_logit(const Float* logits, int64_t begin, int64_t end, Visit&& visit) {
  constexpr int kStride = kScanThreads * kChunk;
  float v[kChunk];
  if (is_aligned16(logits + begin) && (end - begin) % kChunk == 0) {
#pragma unroll 4
    for (int64_t i = begin + threadIdx.x * kChunk; i < end; i += kStride) {
      load_whole_chunk(logits + i, v);
#pragma unroll
      for (int k = 0; k < kChunk; ++k) visit(v[k], i + k, k);
    }
  } else {
    for (int64_t i = begin + threadIdx.x * kChunk; i < end; i += kStride) {
      load_chunk(logits + i, end - i, v);
#pragma unroll
      for (int k = 0; k < kChunk; ++k)
        if (i + k < end) visit(v[k], i + k, k);
    }
  }
}

__device__ float block_max(float x) {
  __shared__ float partial[kScanThreads / kWarp];
  x = warp_max(x);
  if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = x;
  __syncthreads();
  for (int w = 0; w < kScanThreads / kWarp; ++w) x = fmaxf(x, partial[w]);
  return x;
}

// Folds the maxima of a thread's 8 places into as few groups as leave 4 groups a candidate; how many are left.
__device__ __forceinline__ int fold_groups(float (&maxima)[kChunk], int num_candidates) {
  int left = kChunk;
#pragma unroll
  for (int width = kChunk / 2; width > 0; width /= 2) {
    if (num_candidates * 4 > kScanThreads * width) break;
#pragma unroll
    for (int k = 0; k < width; ++k) maxima[k] = fmaxf(maxima[k], maxima[k + width]);
    left = width;
  }
  return left;
}

// A bound from below for the `wanted`-th largest logit, from the maxima of the groups.
__device__ uint32_t find_bound(float (&maxima)[kChunk], int wanted, BlockCounter& counter) {
  const int num_groups = fold_groups(maxima, wanted);
  uint32_t rising[kChunk];
#pragma unroll
  for (int k = 0; k < kChunk; ++k) rising[k] = k < num_groups && maxima[k] > -INFINITY ? rising_bits(maxima[k]) : 0;
  if (num_groups == 1)
    return find_threshold<uint32_t>(wanted, 32, 32 - kBoundBits,
                                    [&](uint32_t bound) { return __syncthreads_count(rising[0] >= bound); });
  return find_threshold<uint32_t>(wanted, 32, 32 - kBoundBits, [&](uint32_t bound) {
    int count = 0;
#pragma unroll
    for (int k = 0; k < kChunk; ++k) count += rising[k] >= bound;
    return counter.count(count);
  });
}

template <class Float>
__global__ void __launch_bounds__(kScanThreads, 1) scan_kernel(DraftTopkArgs a, Workspace workspace) {
  wait_for_previous_kernel();
  allow_next_kernel();
  __shared__ int counters[3], num_kept;
  const int segment = blockIdx.x, id_bits = workspace.id_bits;
  const int64_t row = blockIdx.y;
  const int64_t begin = logits_begin(a, segment), end = logits_begin(a, segment + 1);
  const Float* logits = static_cast<const Float*>(a.logits) + row * a.vocab_size;
  const int wanted = int(min(a.num_candidates, end - begin));
  if (threadIdx.x < 3) counters[threadIdx.x] = 0;
  if (threadIdx.x == 0) num_kept = 0;

  // maxima of groups, and the bound
  bool valid = true;
  float maxima[kChunk];
#pragma unroll
  for (int k = 0; k < kChunk; ++k) maxima[k] = -INFINITY;
  for_each_logit(logits, begin, end, [&](float x, int64_t, int k) {
    valid &= x < INFINITY;
    maxima[k] = fmaxf(maxima[k], x);
  });
  float maximum = maxima[0];
#pragma unroll
  for (int k = 1; k < kChunk; ++k) maximum = fmaxf(maximum, maxima[k]);
  maximum = block_max(maximum);
  valid = __syncthreads_and(valid);
  BlockCounter counter{counters, 0};
  const uint32_t bound = find_bound(maxima, wanted, counter);

  // sum of exponentials, and the candidates
  uint64_t* keys = workspace.keys + (row * kSegments + segment) * kCapacity;
  const auto keep = [&](float x, int64_t id) {
    const int at = atomicAdd(&num_kept, 1);
    if (at < kCapacity) keys[at] = make_key(x, id, id_bits);
  };
  const float least = bound == 0 ? -INFINITY : from_rising_bits(bound), shift = maximum > -INFINITY ? maximum : 0.0f;
  float sum = 0.0f;
  for_each_logit(logits, begin, end, [&](float x, int64_t id, int) {
    sum = __fadd_rn(sum, expf(__fsub_rn(x, shift)));
    if (x >= least) keep(x, id);
  });
  sum = block_sum<kScanThreads>(sum);
  if (num_kept > kCapacity) {  // many equal logits: the exact threshold, bit by bit
    __syncthreads();
    const uint64_t threshold = find_threshold<uint64_t>(wanted, 32 + id_bits, 0, [&](uint64_t higher) {
      int count = 0;
      for_each_logit(logits, begin, end,
                     [&](float x, int64_t id, int) { count += make_key(x, id, id_bits) >= higher; });
      return counter.count(count);
    });
    if (threadIdx.x == 0) num_kept = 0;
    __syncthreads();
    for_each_logit(logits, begin, end, [&](float x, int64_t id, int) {
      if (make_key(x, id, id_bits) >= threshold) keep(x, id);
    });
    __syncthreads();
  }
  if (threadIdx.x == 0) workspace.results[row * kSegments + segment] = {maximum, sum, min(num_kept, kCapacity), !valid};
}

}  // namespace
}  // namespace kdtree
