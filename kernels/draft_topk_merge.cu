// draft_topk_merge on CUDA: a block a row. A rank's candidates are sorted and no two words of a row are equal, so a candidate's
// place among all is its own place plus, for every other rank, how many of that rank's are larger: a binary search.
#include "draft_topk_sum.cuh"
#include "partials.h"

namespace kdtree {
namespace {

constexpr int kThreads = 256, kSegments = 8;

// How many of `count` falling words are larger than `word`.
__device__ __forceinline__ int num_larger(const int64_t* words, int count, int64_t word) {
  int low = 0, high = count;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (words[middle] > word) low = middle + 1;
    else high = middle;
  }
  return low;
}

__global__ void __launch_bounds__(kThreads) draft_topk_merge_kernel(DraftTopkMergeArgs a) {
  wait_for_previous_kernel();
  allow_next_kernel();
  __shared__ RowSum sum;
  const int64_t row = blockIdx.x;
  const int K = int(a.num_candidates), P = int(a.num_partials), segments_each = kSegments / P;
  const auto words_of = [&](int p) { return a.words + (p * a.num_rows + row) * (K + segments_each); };
  if (threadIdx.x == 0)
    sum = sum_of_row([&](int s) { return segment_of_word(words_of(s / segments_each)[K + s % segments_each]); });
  __syncthreads();
  float* log_probs = a.log_probs + row * K;
  int64_t* token_ids = a.token_ids + row * K;
  if (isnan(sum.largest)) {
    for (int k = threadIdx.x; k < K; k += kThreads) log_probs[k] = NAN, token_ids[k] = -1;
    return;
  }
  for (int i = threadIdx.x; i < P * K; i += kThreads) {
    const int rank = i / K, own = i % K;
    const int64_t word = words_of(rank)[own];
    if (word == kNoWord) continue;
    int place = own;
    for (int p = 0; p < P; ++p)
      if (p != rank) place += num_larger(words_of(p), K, word);
    if (place < K) log_probs[place] = sum.log_prob(logit_of_word(word)), token_ids[place] = id_of_word(word);
  }
}

}  // namespace

int draft_topk_merge_cuda(const DraftTopkMergeArgs& a, void* stream) {
  if (!is_num_partials(a.num_partials)) return kUnsupported;
  if (a.num_candidates < 1) return kOutOfRange;
  if (a.num_candidates > INT32_MAX / 16) return kUnsupported;
  if (a.num_rows == 0) return kOk;
  return launch(draft_topk_merge_kernel, {dim3(a.num_rows), dim3(kThreads), 0, 1, Start::kEarly}, stream, a);
}

}  // namespace kdtree
