// The second kernel of draft_topk: log-sum-exp of a row from its segments, and its candidates cut to K and sorted.
#pragma once
#include "draft_topk_scan.cuh"
#include "draft_topk_sum.cuh"

namespace kdtree {
namespace {

constexpr int kSelectThreads = 512;
constexpr int kMaxCandidates = 1024;  // K

// Where a row's results go: log-probs and ids, or the words of a share.
struct SelectOut {
  float* log_probs;
  int64_t *token_ids, *words;
  int64_t num_candidates, first_id;
  int id_bits, first_segment, num_segments;

  __device__ SelectOut(const DraftTopkArgs& a, int64_t row, int id_bits)
      : num_candidates(a.num_candidates), first_id(0), id_bits(id_bits), first_segment(a.first_segment),
        num_segments(a.num_segments) {
    if (num_segments > 0) words = a.words + row * (num_candidates + num_segments);
    else log_probs = a.log_probs + row * num_candidates, token_ids = a.token_ids + row * num_candidates;
    if (num_segments > 0) first_id = segment_begin(a.whole_vocab, first_segment);
  }

  __device__ void candidate(int k, uint64_t key, const RowSum& sum) const {
    const float logit = from_rising_bits(uint32_t(key >> id_bits));
    const int64_t id = int64_t(((uint64_t{1} << id_bits) - 1) & ~key);
    if (num_segments > 0) words[k] = make_word(logit, uint32_t(first_id + id));
    else log_probs[k] = sum.log_prob(logit), token_ids[k] = id;
  }
  __device__ void none(int k, float log_prob) const {
    if (num_segments > 0) words[k] = kNoWord;
    else log_probs[k] = log_prob, token_ids[k] = -1;
  }
  __device__ void segments(const SegmentResult* results) const {
    for (int s = 0; s < num_segments; ++s) {
      const SegmentResult& r = results[first_segment + s];
      words[num_candidates + s] = make_word(SegmentSum{r.invalid ? NAN : r.maximum, r.sum});
    }
  }
};

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
  const int id_bits = workspace.id_bits;
  const int num_candidates = int(min(a.num_candidates, a.vocab_size));  // a share may have fewer than are asked for
  const SegmentResult* results = workspace.results + row * kSegments;
  const SelectOut out(a, row, id_bits);

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
  if (threadIdx.x == kSelectThreads - 1) {
    s.sum = sum_of_row([&](int k) { return results[k].invalid ? SegmentSum{NAN, 0.0f} : SegmentSum{results[k].maximum, results[k].sum}; });
    out.segments(results);
  }
  __syncthreads();
  least = __reduce_min_sync(0xffffffffu, least);
  if (threadIdx.x % kWarp == 0) atomicMin(&s.least, least);
  __syncthreads();
  if (isnan(s.sum.largest)) {
    for (int k = threadIdx.x; k < a.num_candidates; k += kSelectThreads) out.none(k, NAN);
    return;
  }
  const uint32_t most = rising_bits(s.sum.largest);
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
  for (int k = threadIdx.x; k < a.num_candidates; k += kSelectThreads) {
    if (k < num_candidates) out.candidate(k, s.kept[k], s.sum);
    else out.none(k, -INFINITY);
  }
}

}  // namespace
}  // namespace kdtree
