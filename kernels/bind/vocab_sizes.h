// Sizes of the operations on a part of the vocabulary, read off their tensors and checked.
#pragma once
#include <ATen/core/Tensor.h>

#include "../partials.h"
#include "checks.h"

namespace kdtree::bind {

// draft_topk_share: logits [B, L, V'] of a share of whole_vocab tokens.
inline SegmentShare expect_vocab_share(const char* op, const at::Tensor& logits, int64_t num_candidates,
                                       int64_t whole_vocab, int64_t first_segment, int64_t num_segments) {
  expect_dim(op, "logits", logits, 3, "[B, L, V']");
  expect_contiguous(op, "logits", logits);
  expect_range(op, "num_segments", num_segments, 1, kNumSegments);
  expect_at_least(op, "part of the vocabulary V'", logits.size(2), 1);
  expect_range(op, "num_candidates", num_candidates, 1, whole_vocab);
  return expect_share(op, "whole_vocab", logits.size(2), whole_vocab, first_segment, num_segments);
}

// draft_topk_merge: words [P, B, L, K + 8 / P]; P.
inline int64_t expect_topk_words(const char* op, const at::Tensor& words, int64_t num_candidates) {
  expect_dim(op, "words", words, 4, "[P, B, L, K + 8 / P]");
  const int64_t P = words.size(0);
  KDTREE_CHECK(is_num_partials(P), op, ": words: expected those of 1, 2, 4 or 8 ranks, got ", P);
  expect_at_least(op, "num_candidates", num_candidates, 1);
  expect_dense(op, "words", words, at::kLong, {P, -1, -1, num_candidates + kNumSegments / P}, "[P, B, L, K + 8 / P]");
  return P;
}

}  // namespace kdtree::bind
