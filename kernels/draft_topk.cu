// Log-softmax over the vocabulary and its K largest, in two kernels. `scan` gives a block one of the 8 vocabulary
// segments of a row: its maximum, its sum of exponentials, and every logit that may be among the K largest. `select`
// gives a block the candidates of a row, which it cuts to K and sorts.
//
// A bound from below for the K-th largest logit of a segment is the K-th largest of many disjoint groups' maxima; few
// more than K logits reach it. Order of additions: a thread adds the terms of its chunks of 8 in ascending id, then
// block_sum, then the segments, scaled to the row's maximum, as ((0+1)+(2+3))+((4+5)+(6+7)). It depends on V alone.
#include "cuda_rows.cuh"
#include "topk.cuh"

namespace kdtree {
namespace {

constexpr int kSegments = 8, kScanThreads = 512, kSelectThreads = 512;
constexpr int kMaxCandidates = 1024;  // K
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
  const int64_t begin = segment_begin(a.vocab_size, segment), end = segment_begin(a.vocab_size, segment + 1);
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

int64_t draft_topk_cuda_workspace_bytes(const DraftTopkArgs& a) {
  return results_bytes(a.num_rows) + a.num_rows * kSegments * kCapacity * int64_t(sizeof(uint64_t));
}

int draft_topk_cuda(const DraftTopkArgs& a, void* stream) {
  if (a.num_candidates < 1 || a.num_candidates > a.vocab_size) return kOutOfRange;
  if (a.num_candidates > kMaxCandidates || a.vocab_size > int64_t{1} << 30 || a.num_rows > 65535) return kUnsupported;
  if (a.num_rows == 0) return kOk;
  char* base = static_cast<char*>(a.workspace);
  Workspace workspace{reinterpret_cast<SegmentResult*>(base),
                      reinterpret_cast<uint64_t*>(base + results_bytes(a.num_rows)), 1};
  while (int64_t{1} << workspace.id_bits < a.vocab_size) ++workspace.id_bits;
  const int status = with_dtype(a.dtype, [&](auto element) {
    const LaunchShape shape{dim3(kSegments, a.num_rows), dim3(kScanThreads), 0, 1, true};
    return launch(scan_kernel<decltype(element)>, shape, stream, a, workspace);
  });
  if (status) return status;
  return launch(select_kernel, {dim3(a.num_rows), dim3(kSelectThreads), 0, 1, true}, stream, a, workspace);
}

}  // namespace kdtree
