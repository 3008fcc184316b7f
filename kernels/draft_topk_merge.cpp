// draft_topk_merge: the K best of the ranks' candidates, and log-softmax from their segments' sums.
#include <algorithm>
#include <atomic>
#include <functional>
#include <limits>
#include <vector>

#include "draft_topk_sum.h"
#include "op_args.h"
#include "parallel.h"
#include "partials.h"

namespace kdtree {
namespace {

// One row; false if a logit is NaN or +inf.
bool merge_row(const DraftTopkMergeArgs& a, int64_t row, std::vector<int64_t>& candidates) {
  const int64_t K = a.num_candidates, segments_each = kNumSegments / a.num_partials, num_words = K + segments_each;
  candidates.clear();
  SegmentSum sums[kNumSegments];
  for (int64_t p = 0; p < a.num_partials; ++p) {
    const int64_t* words = a.words + (p * a.num_rows + row) * num_words;
    candidates.insert(candidates.end(), words, words + K);
    for (int64_t s = 0; s < segments_each; ++s) sums[p * segments_each + s] = segment_of_word(words[K + s]);
  }
  const RowSum sum = sum_of_row(sums);
  if (sum.largest != sum.largest) {
    std::fill_n(a.log_probs + row * K, K, std::numeric_limits<float>::quiet_NaN());
    std::fill_n(a.token_ids + row * K, K, -1);
    return false;
  }
  std::partial_sort(candidates.begin(), candidates.begin() + K, candidates.end(), std::greater<int64_t>());
  for (int64_t k = 0; k < K; ++k) {
    a.log_probs[row * K + k] = sum.log_prob(logit_of_word(candidates[k]));
    a.token_ids[row * K + k] = id_of_word(candidates[k]);
  }
  return true;
}

}  // namespace

int draft_topk_merge_cpu(const DraftTopkMergeArgs& a) {
  if (!is_num_partials(a.num_partials)) return kUnsupported;
  if (a.num_candidates < 1) return kOutOfRange;
  std::atomic<bool> finite{true};
  run_shares(threads_for(a.num_rows * a.num_partials * a.num_candidates, a.num_threads), a.num_rows,
             [&](int64_t begin, int64_t end, int) {
               std::vector<int64_t> candidates;
               for (int64_t row = begin; row < end; ++row)
                 if (!merge_row(a, row, candidates)) finite = false;
             });
  return finite ? kOk : kNonFinite;
}

}  // namespace kdtree
