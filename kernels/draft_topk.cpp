// Log-softmax over the vocabulary and its K largest, two passes over each row: the first finds the maximum of every
// block of 64 logits, the second sums the exponentials; only blocks that can hold a candidate are looked into.
//
// Order of additions: the vocabulary is cut into 8 segments (segments.h); in a segment lane i % 16 adds its terms, relative
// to the segment's largest logit, in ascending i, then the lanes (sum_lanes); then the segments, scaled to the row's largest,
// as in draft_topk_sum.h. Nothing depends on threads, nor on which rank has a segment.
#include <algorithm>
#include <atomic>
#include <limits>

#include "draft_topk_sum.h"
#include "op_args.h"
#include "parallel.h"
#include "segments.h"
#include "topk.h"

namespace kdtree {
namespace {

constexpr int64_t kExpWork = 4;  // a logit in units of parallel.h

// One segment of a row without a NaN.
template <class Float>
SegmentSum sum_segment(const Float* logits, int64_t count) {
  Vec16 largest = Vec16::all(-kInfinity), lanes = Vec16::all(0.0f);
  for (int64_t i = 0; i < count; i += kLanes) largest = max(load_padded(logits + i, count - i), largest);
  const float maximum = max_lanes(largest);
  if (maximum == -kInfinity) return {maximum, 0.0f};  // then x - maximum would be NaN
  for (int64_t i = 0; i < count; i += kLanes)
    lanes = lanes + exp(load_padded(logits + i, count - i) - Vec16::all(maximum));
  return {maximum, sum_lanes(lanes)};
}

template <class Float>
void sum_segments(const Float* logits, const Segments& segments, SegmentSum (&sums)[kNumSegments]) {
  for (int s = 0; s < kNumSegments; ++s)
    sums[s] = sum_segment(logits + segments.bounds[s], segments.bounds[s + 1] - segments.bounds[s]);
}

// One row; false if it holds a NaN or +inf.
template <class Float>
bool topk_row(const Float* logits, const DraftTopkArgs& args, float* log_probs, int64_t* token_ids, TopkScratch& scratch) {
  const float row_max = find_maxima(logits, args.vocab_size, scratch.block_max);
  if (!(row_max < kInfinity)) {
    std::fill(log_probs, log_probs + args.num_candidates, std::numeric_limits<float>::quiet_NaN());
    std::fill(token_ids, token_ids + args.num_candidates, -1);
    return false;
  }
  find_largest(logits, args.vocab_size, args.num_candidates, scratch);
  SegmentSum sums[kNumSegments];
  sum_segments(logits, Segments(args.vocab_size), sums);
  const RowSum row = sum_of_row(sums);
  for (int64_t k = 0; k < args.num_candidates; ++k) {
    log_probs[k] = row.log_prob(logit_of(scratch.keys[k]));
    token_ids[k] = int64_t(uint32_t(scratch.keys[k]));
  }
  return true;
}

// What other ranks must know of one row: candidates, then segments.
template <class Float>
void share_row(const Float* logits, const DraftTopkArgs& a, int64_t* words, TopkScratch& scratch) {
  const Segments segments(SegmentShare{a.whole_vocab, a.first_segment, a.num_segments});
  const int64_t first_id = SegmentShare{a.whole_vocab, a.first_segment, a.num_segments}.begin();
  const float row_max = find_maxima(logits, a.vocab_size, scratch.block_max);
  std::fill(words, words + a.num_candidates, kNoWord);
  if (!(row_max < kInfinity)) {
    const int64_t invalid = make_word(SegmentSum{std::numeric_limits<float>::quiet_NaN(), 0.0f});
    std::fill(words + a.num_candidates, words + a.num_candidates + a.num_segments, invalid);
    return;
  }
  find_largest(logits, a.vocab_size, std::min(a.num_candidates, a.vocab_size), scratch);
  for (size_t k = 0; k < scratch.keys.size(); ++k)
    words[k] = make_word(logit_of(scratch.keys[k]), uint32_t(first_id + uint32_t(scratch.keys[k])));
  SegmentSum sums[kNumSegments];
  sum_segments(logits, segments, sums);
  for (int s = 0; s < a.num_segments; ++s) words[a.num_candidates + s] = make_word(sums[a.first_segment + s]);
}

template <class Float>
int share(const DraftTopkArgs& args) {
  const auto* logits = static_cast<const Float*>(args.logits);
  const int64_t num_words = args.num_candidates + args.num_segments;
  run_shares(threads_for(args.num_rows * args.vocab_size * kExpWork, args.num_threads), args.num_rows,
             [&](int64_t begin, int64_t end, int) {
               TopkScratch scratch;
               for (int64_t row = begin; row < end; ++row)
                 share_row(logits + row * args.vocab_size, args, args.words + row * num_words, scratch);
             });
  return kOk;
}

template <class Float>
int topk(const DraftTopkArgs& args) {
  const auto* logits = static_cast<const Float*>(args.logits);
  std::atomic<bool> finite{true};
  run_shares(threads_for(args.num_rows * args.vocab_size * kExpWork, args.num_threads), args.num_rows,
             [&](int64_t begin, int64_t end, int) {
               TopkScratch scratch;
               for (int64_t row = begin; row < end; ++row)
                 if (!topk_row(logits + row * args.vocab_size, args, args.log_probs + row * args.num_candidates,
                               args.token_ids + row * args.num_candidates, scratch))
                   finite = false;
             });
  return finite ? kOk : kNonFinite;
}

}  // namespace

int draft_topk_cpu(const DraftTopkArgs& args) {
  const bool is_share = args.num_segments > 0;
  if (args.num_candidates < 1 || args.num_candidates > (is_share ? args.whole_vocab : args.vocab_size)) return kOutOfRange;
  if (!SegmentShare{args.whole_vocab, args.first_segment, args.num_segments}.fits(args.vocab_size)) return kUnsupported;
  if (args.vocab_size > int64_t(std::numeric_limits<uint32_t>::max())) return kUnsupported;
  if (is_share) return args.dtype == kBF16 ? share<Bf16>(args) : share<float>(args);
  return args.dtype == kBF16 ? topk<Bf16>(args) : topk<float>(args);
}

}  // namespace kdtree
