// The second kernel of draft_topk: log-sum-exp of a row from its segments, and its candidates cut to K and sorted.
#pragma once
#include "draft_topk_scan.cuh"

namespace kdtree {
namespace {

constexpr int kSelectThreads = 512;
constexpr int kMaxCandidates = 1024;  // K

// The maximum of the row and the logarithm of its sum of exponentials; `empty` where every logit is -inf.
struct RowSum {
  float maximum, log_sum;
  bool empty, invalid;
};

__device__ RowSum combine_segments(const SegmentResult* results) {
  RowSum row{-INFINITY, 0.0f, false, false};
  for (int s = 0; s < kSegments; ++s) {
    row.maximum = fmaxf(row.maximum, results[s].maximum);
    row.invalid |= results[s].invalid != 0;
  }
  row.empty = row.maximum == -INFINITY;
  if (row.empty || row.invalid) return row;
  float sum[kSegments];
#pragma unroll
  for (int s = 0; s < kSegments; ++s)
    sum[s] = results[s].sum == 0.0f
                 ? 0.0f
                 : __fmul_rn(results[s].sum, expf(__fsub_rn(results[s].maximum, row.maximum)));
  const float low = __fadd_rn(__fadd_rn(sum[0], sum[1]), __fadd_rn(sum[2], sum[3]));
  const float high = __fadd_rn(__fadd_rn(sum[4], sum[5]), __fadd_rn(sum[6], sum[7]));
  row.log_sum = float(log(double(__fadd_rn(low, high))));  // of at least 1
  return row;
}

struct SelectShared {
  uint64_t kept[kMaxCandidates];
  DigitBins<int> digits;
  int num_kept;
  uint32_t least;
  RowSum sum;
};

// Few keys: each counts those above it, with 4 threads.
__device__ void sort_few(uint64_t* keys, int count) {
  const int i = threadIdx.x / 4;
  const uint64_t mine = i < count ? keys[i] : 0;
  int above = 0;
  for (int j = threadIdx.x % 4; j < count; j += 4) above += keys[j] > mine;
  above += __shfl_xor_sync(0xffffffffu, above, 1);
  above += __shfl_xor_sync(0xffffffffu, above, 2);
  __syncthreads();
  if (i < count && threadIdx.x % 4 == 0) keys[above] = mine;
  __syncthreads();
}

// Largest first; `size` is a power of two, at most 2 * kSelectThreads.
__device__ void sort_many(uint64_t* keys, int size) {
  for (int width = 2; width <= size; width *= 2)
    for (int stride = width / 2; stride > 0; stride /= 2) {
      __syncthreads();
      const int low = (threadIdx.x / stride) * 2 * stride + threadIdx.x % stride, high = low + stride;
      if (high >= size) continue;
      const uint64_t x = keys[low], y = keys[high];
      if ((x < y) == ((low & width) == 0)) keys[low] = y, keys[high] = x;
    }
  __syncthreads();
}

__global__ void __launch_bounds__(kSelectThreads, 1) select_kernel(DraftTopkArgs a, Workspace workspace) {
  constexpr int kThreadsPerSegment = kSelectThreads / kSegments, kKeys = kCapacity / kThreadsPerSegment;
  __shared__ SelectShared s;
  if (threadIdx.x == 0) s.num_kept = 0, s.least = ~0u;
  for (int k = threadIdx.x; k < kMaxCandidates; k += kSelectThreads) s.kept[k] = 0;
  wait_for_previous_kernel();
  allow_next_kernel();
  const int64_t row = blockIdx.x;
  const int num_candidates = int(a.num_candidates), id_bits = workspace.id_bits;
  const SegmentResult* results = workspace.results + row * kSegments;
  float* log_probs = a.log_probs + row * num_candidates;
  int64_t* token_ids = a.token_ids + row * num_candidates;

  const int segment = threadIdx.x / kThreadsPerSegment, place = threadIdx.x % kThreadsPerSegment;
  const int count = results[segment].count;
  const uint64_t* source = workspace.keys + (row * kSegments + segment) * kCapacity + place;
  const int mine = max(0, (count - place + kThreadsPerSegment - 1) / kThreadsPerSegment);
  uint64_t keys[kKeys];
  uint32_t least = ~0u;
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    if (i >= mine) break;
    keys[i] = source[i * kThreadsPerSegment];
    least = min(least, uint32_t(keys[i] >> id_bits));
  }
  const auto visit = [&](auto&& f) {
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      if (i >= mine) break;
      f(keys[i], 1);
    }
  };
  if (threadIdx.x == kSelectThreads - 1) s.sum = combine_segments(results);
  __syncthreads();
  least = __reduce_min_sync(0xffffffffu, least);
  if (threadIdx.x % kWarp == 0) atomicMin(&s.least, least);
  __syncthreads();
  if (s.sum.invalid) {
    for (int k = threadIdx.x; k < num_candidates; k += kSelectThreads) log_probs[k] = NAN, token_ids[k] = -1;
    return;
  }
  const uint32_t most = rising_bits(s.sum.maximum);
  const int top = 31 - __clz(int(most ^ s.least)) + id_bits;  // -1 + id_bits if all logits are equal
  const uint64_t threshold = select_threshold<kSelectThreads>(s.digits, num_candidates, top, uint64_t(most) << id_bits, visit);
  visit([&](uint64_t key, int) {
    if (key < threshold) return;
    const int at = atomicAdd(&s.num_kept, 1);
    if (at < kMaxCandidates) s.kept[at] = key;
  });
  __syncthreads();
  int size = 1;
  while (size < num_candidates) size *= 2;
  if (num_candidates <= kSelectThreads / 4)
    sort_few(s.kept, num_candidates);
  else
    sort_many(s.kept, size);
  for (int k = threadIdx.x; k < num_candidates; k += kSelectThreads) {
    const float logit = from_rising_bits(uint32_t(s.kept[k] >> id_bits));
    log_probs[k] = s.sum.empty ? -INFINITY : __fsub_rn(__fsub_rn(logit, s.sum.maximum), s.sum.log_sum);
    token_ids[k] = int64_t(((uint64_t{1} << id_bits) - 1) & ~s.kept[k]);
  }
}

}  // namespace
}  // namespace kdtree
