// Log-softmax over the vocabulary and its K largest, in two kernels. `scan` gives a block one of the 8 vocabulary segments
// of a row: its maximum, its sum of exponentials, and every logit that may be among the K largest. `select` gives a block
// the candidates of a row, which it cuts to K and sorts.
//
// A bound from below for the K-th largest logit of a segment is the K-th largest of many disjoint groups' maxima; a few
// more than K logits reach it. Order of additions: a thread adds the terms of its chunks of 8 in ascending id, then
// block_sum, then the segments, scaled to the row's maximum, as ((0+1)+(2+3))+((4+5)+(6+7)). It depends on V alone.
#include "cuda_rows.cuh"
#include "ordered_bits.cuh"

namespace kdtree {
namespace {

constexpr int kSegments = 8, kScanThreads = 512, kSelectThreads = 1024;
constexpr int kMaxCandidates = 1024;  // K
constexpr int kCapacity = 2048;       // candidates of one segment that `scan` may hand on
constexpr int kBoundBits = 20;        // of the FP32 that bounds the K-th largest: sign, exponent, 11 bits of mantissa

struct SegmentResult {
  float maximum, sum;  // of logits; of exp(logit - maximum)
  int count;           // candidates
  int invalid;         // a NaN or +inf
};

struct Workspace {
  SegmentResult* results;  // [rows, 8]
  uint64_t* keys;          // [rows, 8, kCapacity]
};

int64_t results_bytes(int64_t num_rows) { return ceil_div(num_rows * kSegments * int64_t(sizeof(SegmentResult)), 256) * 256; }

// Begin of segment s of V logits: units of 32, as segments.h cuts every reduction.
__device__ __forceinline__ int64_t segment_begin(int64_t vocab_size, int s) {
  return min(32 * (s * ((vocab_size + 31) / 32) / kSegments), vocab_size);
}

// Falls with the logit, then rises with the id: larger is better. Never 0.
__device__ __forceinline__ uint64_t make_key(float logit, int64_t id) {
  return uint64_t(rising_bits(logit)) << 32 | uint32_t(~uint32_t(id));
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

// The largest threshold of type Key with at least `wanted` keys at or above it, or any threshold with exactly `wanted`; its
// lowest `free_bits` bits are 0. num_above(t) counts this thread's keys >= t. 0 if there are fewer keys.
template <class Key, class NumAbove>
__device__ Key find_threshold(BlockCounter& counter, int wanted, int free_bits, NumAbove&& num_above) {
  Key threshold = 0;
  for (int bit = int(sizeof(Key)) * 8 - 1; bit >= free_bits; --bit) {
    const Key higher = threshold | Key(1) << bit;
    const int total = counter.count(num_above(higher));
    if (total >= wanted) threshold = higher;
    if (total == wanted) break;
  }
  return threshold;
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

// Folds the maxima of a thread's 8 places into as few groups as leave 4 groups a candidate.
__device__ __forceinline__ void fold_groups(uint32_t (&maxima)[kChunk], int num_candidates) {
#pragma unroll
  for (int width = kChunk / 2; width > 0; width /= 2) {
    if (num_candidates * 4 > kScanThreads * width) break;
#pragma unroll
    for (int k = 0; k < width; ++k) {
      maxima[k] = max(maxima[k], maxima[k + width]);
      maxima[k + width] = 0;
    }
  }
}

template <class Float>
__global__ void __launch_bounds__(kScanThreads, 1) scan_kernel(DraftTopkArgs a, Workspace workspace) {
  wait_for_previous_kernel();
  allow_next_kernel();
  __shared__ int counters[3], num_kept;
  const int segment = blockIdx.x;
  const int64_t row = blockIdx.y;
  const int64_t begin = segment_begin(a.vocab_size, segment), end = segment_begin(a.vocab_size, segment + 1);
  const Float* logits = static_cast<const Float*>(a.logits) + row * a.vocab_size;
  const int wanted = int(min(a.num_candidates, end - begin));
  if (threadIdx.x < 3) counters[threadIdx.x] = 0;
  if (threadIdx.x == 0) num_kept = 0;

  // maxima of groups, and the bound
  bool invalid = false;
  float maximum = -INFINITY;
  uint32_t maxima[kChunk] = {};
  for_each_logit(logits, begin, end, [&](float x, int64_t, int k) {
    invalid |= !(x < INFINITY);
    maximum = fmaxf(maximum, x);
    maxima[k] = max(maxima[k], rising_bits(x));
  });
  fold_groups(maxima, wanted);
  maximum = block_max(maximum);
  invalid = __syncthreads_or(invalid);
  BlockCounter counter{counters, 0};
  const auto num_groups_above = [&](uint32_t bound) {
    int count = 0;
#pragma unroll
    for (int k = 0; k < kChunk; ++k) count += maxima[k] >= bound;
    return count;
  };
  uint64_t threshold = uint64_t(find_threshold<uint32_t>(counter, wanted, 32 - kBoundBits, num_groups_above)) << 32;

  // sum of exponentials, and the candidates
  uint64_t* keys = workspace.keys + (row * kSegments + segment) * kCapacity;
  float sum = 0.0f;
  const auto keep = [&](uint64_t key) {
    if (key < threshold) return;
    const int at = atomicAdd(&num_kept, 1);
    if (at < kCapacity) keys[at] = key;
  };
  for_each_logit(logits, begin, end, [&](float x, int64_t id, int) {
    if (maximum > -INFINITY) sum = __fadd_rn(sum, expf(__fsub_rn(x, maximum)));
    keep(make_key(x, id));
  });
  sum = block_sum<kScanThreads>(sum);
  if (num_kept > kCapacity) {  // many equal logits: the exact threshold, bit by bit
    __syncthreads();
    threshold = find_threshold<uint64_t>(counter, wanted, 0, [&](uint64_t bound) {
      int count = 0;
      for_each_logit(logits, begin, end, [&](float x, int64_t id, int) { count += make_key(x, id) >= bound; });
      return count;
    });
    if (threadIdx.x == 0) num_kept = 0;
    __syncthreads();
    for_each_logit(logits, begin, end, [&](float x, int64_t id, int) { keep(make_key(x, id)); });
    __syncthreads();
  }
  if (threadIdx.x == 0) workspace.results[row * kSegments + segment] = {maximum, sum, min(num_kept, kCapacity), invalid};
}

// Largest first; `size` is a power of two, at most 2 * kSelectThreads.
__device__ void sort_keys(uint64_t* keys, int size) {
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
    sum[s] = results[s].sum == 0.0f ? 0.0f : __fmul_rn(results[s].sum, expf(__fsub_rn(results[s].maximum, row.maximum)));
  const float low = __fadd_rn(__fadd_rn(sum[0], sum[1]), __fadd_rn(sum[2], sum[3]));
  const float high = __fadd_rn(__fadd_rn(sum[4], sum[5]), __fadd_rn(sum[6], sum[7]));
  row.log_sum = float(log(double(__fadd_rn(low, high))));  // of at least 1
  return row;
}

__global__ void __launch_bounds__(kSelectThreads) select_kernel(DraftTopkArgs a, Workspace workspace) {
  constexpr int kThreadsPerSegment = kSelectThreads / kSegments, kKeys = kCapacity / kThreadsPerSegment;
  __shared__ int counters[3], num_kept;
  __shared__ uint64_t kept[kMaxCandidates];
  __shared__ RowSum sum;
  if (threadIdx.x < 3) counters[threadIdx.x] = 0;
  if (threadIdx.x == 0) num_kept = 0;
  wait_for_previous_kernel();
  allow_next_kernel();
  const int64_t row = blockIdx.x;
  const int num_candidates = int(a.num_candidates);
  const SegmentResult* results = workspace.results + row * kSegments;
  float* log_probs = a.log_probs + row * num_candidates;
  int64_t* token_ids = a.token_ids + row * num_candidates;

  const int segment = threadIdx.x / kThreadsPerSegment, count = results[segment].count;
  const uint64_t* source = workspace.keys + (row * kSegments + segment) * kCapacity;
  uint64_t keys[kKeys];
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    const int at = threadIdx.x % kThreadsPerSegment + i * kThreadsPerSegment;
    keys[i] = at < count ? source[at] : 0;
  }
  if (threadIdx.x == kSelectThreads - 1) sum = combine_segments(results);
  __syncthreads();
  if (sum.invalid) {
    for (int k = threadIdx.x; k < num_candidates; k += kSelectThreads) log_probs[k] = NAN, token_ids[k] = -1;
    return;
  }
  BlockCounter counter{counters, 0};
  const uint64_t threshold = find_threshold<uint64_t>(counter, num_candidates, 0, [&](uint64_t bound) {
    int above = 0;
#pragma unroll
    for (int i = 0; i < kKeys; ++i) above += keys[i] >= bound;
    return above;
  });
  int size = 1;
  while (size < num_candidates) size *= 2;
  for (int k = threadIdx.x; k < size; k += kSelectThreads) kept[k] = 0;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kKeys; ++i)
    if (keys[i] != 0 && keys[i] >= threshold) {
      const int at = atomicAdd(&num_kept, 1);
      if (at < kMaxCandidates) kept[at] = keys[i];
    }
  sort_keys(kept, size);
  for (int k = threadIdx.x; k < num_candidates; k += kSelectThreads) {
    const float logit = from_rising_bits(uint32_t(kept[k] >> 32));
    log_probs[k] = sum.empty ? -INFINITY : __fsub_rn(__fsub_rn(logit, sum.maximum), sum.log_sum);
    token_ids[k] = uint32_t(~uint32_t(kept[k]));
  }
}

}  // namespace

int64_t draft_topk_cuda_workspace_bytes(const DraftTopkArgs& a) {
  return results_bytes(a.num_rows) + a.num_rows * kSegments * kCapacity * int64_t(sizeof(uint64_t));
}

int draft_topk_cuda(const DraftTopkArgs& a, void* stream) {
  if (a.num_candidates < 1 || a.num_candidates > a.vocab_size) return kOutOfRange;
  if (a.num_candidates > kMaxCandidates || a.vocab_size > int64_t{1} << 31 || a.num_rows > 65535) return kUnsupported;
  if (a.num_rows == 0) return kOk;
  char* base = static_cast<char*>(a.workspace);
  const Workspace workspace{reinterpret_cast<SegmentResult*>(base),
                            reinterpret_cast<uint64_t*>(base + results_bytes(a.num_rows))};
  const int status = with_dtype(a.dtype, [&](auto element) {
    const LaunchShape shape{dim3(kSegments, a.num_rows), dim3(kScanThreads), 0, 1, true};
    return launch(scan_kernel<decltype(element)>, shape, stream, a, workspace);
  });
  if (status) return status;
  return launch(select_kernel, {dim3(a.num_rows), dim3(kSelectThreads), 0, 1, true}, stream, a, workspace);
}

}  // namespace kdtree
