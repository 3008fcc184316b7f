// Bindings of the operations on vocabularies, whole or shared by ranks: sampling and the candidates of a draft. On a GPU
// values are not checked, see cuda_call.h: parameters that sample refuses give token -1 there.
#pragma once
#include "../partials.h"
#include "../sampling.h"
#include "call.h"

namespace kdtree::bind {

template <class Device>
std::tuple<Tensor, Tensor> draft_topk(const Tensor& logits, int64_t num_candidates) {
  const char* op = "draft_topk";
  const Device call(op, "logits", logits);
  expect_dim(op, "logits", logits, 3, "[B, L, V]");
  expect_contiguous(op, "logits", logits);
  const Dtype dtype = float_type(op, "logits", logits);
  const int64_t num_streams = logits.size(0), max_depth = logits.size(1), vocab_size = logits.size(2);
  expect_range(op, "num_candidates", num_candidates, 1, vocab_size);
  Tensor log_probs = call.empty({num_streams, max_depth, num_candidates}, at::kFloat);
  Tensor token_ids = call.empty({num_streams, max_depth, num_candidates}, at::kLong);
  DraftTopkArgs args{logits.const_data_ptr(), log_probs.mutable_data_ptr<float>(),
                     token_ids.mutable_data_ptr<int64_t>(), num_streams * max_depth, vocab_size, num_candidates, dtype,
                     call.num_threads()};
  const Tensor workspace = call.workspace_of(args);
  const int status = call.run(args);
  if (call.refused(status, kNonFinite)) {
    const auto* values = log_probs.const_data_ptr<float>();
    int64_t row = 0;  // the first that the kernel marked with NaN
    while (values[row * num_candidates] == values[row * num_candidates]) ++row;
    fail_non_finite(row, max_depth);
  }
  call.check(status);
  return {log_probs, token_ids};
}

// logits [B, L, V'] of a share of whole_vocab tokens.
template <class Device>
Tensor draft_topk_share(const Tensor& logits, int64_t num_candidates, int64_t whole_vocab, int64_t first_segment,
                        int64_t num_segments) {
  const char* op = "draft_topk_share";
  const Device call(op, "logits", logits);
  const Dtype dtype = float_type(op, "logits", logits);
  expect_dim(op, "logits", logits, 3, "[B, L, V']");
  expect_contiguous(op, "logits", logits);
  expect_range(op, "num_segments", num_segments, 1, kNumSegments);
  expect_at_least(op, "part of the vocabulary V'", logits.size(2), 1);
  expect_range(op, "num_candidates", num_candidates, 1, whole_vocab);
  const auto share = expect_share(op, "whole_vocab", logits.size(2), whole_vocab, first_segment, num_segments);
  Tensor words = call.empty({logits.size(0), logits.size(1), num_candidates + num_segments}, at::kLong);
  DraftTopkArgs args{logits.const_data_ptr(), nullptr, nullptr, logits.size(0) * logits.size(1), logits.size(2),
                     num_candidates, dtype, call.num_threads(), nullptr, words.mutable_data_ptr<int64_t>(), share.whole,
                     share.first, share.count};
  const Tensor workspace = call.workspace_of(args);
  call.check(call.run(args));
  return words;
}

// words [P, B, L, K + 8 / P] of P ranks.
template <class Device>
std::tuple<Tensor, Tensor> draft_topk_merge(const Tensor& words, int64_t num_candidates) {
  const char* op = "draft_topk_merge";
  const Device call(op, "words", words);
  expect_dim(op, "words", words, 4, "[P, B, L, K + 8 / P]");
  const int64_t P = words.size(0), max_depth = words.size(2);
  KDTREE_CHECK(is_num_partials(P), op, ": words: expected those of 1, 2, 4 or 8 ranks, got ", P);
  expect_at_least(op, "num_candidates", num_candidates, 1);
  expect_dense(op, "words", words, at::kLong, {P, -1, -1, num_candidates + kNumSegments / P}, "[P, B, L, K + 8 / P]");
  Tensor log_probs = call.empty({words.size(1), max_depth, num_candidates}, at::kFloat);
  Tensor token_ids = call.empty({words.size(1), max_depth, num_candidates}, at::kLong);
  const int status =
      call.run(DraftTopkMergeArgs{words.const_data_ptr<int64_t>(), log_probs.mutable_data_ptr<float>(),
                                  token_ids.mutable_data_ptr<int64_t>(), P, words.size(1) * max_depth, num_candidates,
                                  call.num_threads()});
  if (call.refused(status, kNonFinite)) {
    int64_t row = 0;
    while (token_ids.const_data_ptr<int64_t>()[row * num_candidates] >= 0) ++row;
    fail_non_finite(row, max_depth);
  }
  call.check(status);
  return {log_probs, token_ids};
}

// How rows are sampled: arrays of T rows and S streams. S.
template <class Device>
int64_t expect_sampling(const Device& call, int64_t num_rows, const Tensor& stream, const Tensor& position,
                        const Tensor& temperature, const Tensor& top_k, const Tensor& top_p, const Tensor& seed) {
  call.expect("stream", stream, at::kInt, {num_rows}, "[T]");
  call.expect("position", position, at::kInt, {num_rows}, "[T]");
  call.expect("temperature", temperature, at::kFloat, {-1}, "[S]");
  const int64_t num_streams = temperature.size(0);
  call.expect("top_k", top_k, at::kInt, {num_streams}, "[S]");
  call.expect("top_p", top_p, at::kFloat, {num_streams}, "[S]");
  call.expect("seed", seed, at::kLong, {num_streams}, "[S]");
  return num_streams;
}

// After a kernel has returned kOutOfRange: raises for the first stream whose parameters it refuses, or the first row that
// is not one of a stream. Args: SampleArgs or SampleAmongArgs.
template <class Args>
void expect_parameters(const char* op, const Args& a, const Tensor& stream, const Tensor& position) {
  for (int64_t s = 0; s < a.num_streams; ++s) {
    const float temperature = a.temperature[s];
    KDTREE_CHECK(is_temperature(temperature), op, ": stream ", s, ": temperature: expected 0 or a finite number of at "
                 "least 2^-126, got ", temperature);
    KDTREE_CHECK(is_top_k(a.top_k[s]), op, ": stream ", s, ": top_k: expected 0 (all) … ", kMaxTopK, ", got ",
                 a.top_k[s]);
    KDTREE_CHECK(is_top_p(a.top_p[s]), op, ": stream ", s, ": top_p: expected above 0 and at most 1, got ",
                 a.top_p[s]);
  }
  expect_values<int32_t>(op, "stream", stream, 0, a.num_streams - 1);
  expect_values<int32_t>(op, "position", position, 0, INT32_MAX);
}

template <class Device>
Tensor sample(const Tensor& logits, const Tensor& stream, const Tensor& position, const Tensor& temperature,
              const Tensor& top_k, const Tensor& top_p, const Tensor& seed, const OptionalTensor& rows_used) {
  const char* op = "sample";
  const Device call(op, "logits", logits);
  call.expect("logits", logits, at::kFloat, {-1, -1}, "[T, V]");
  const int64_t num_rows = logits.size(0), vocab_size = logits.size(1);
  expect_at_least(op, "vocabulary size V", vocab_size, 1);
  const int64_t num_streams = expect_sampling(call, num_rows, stream, position, temperature, top_k, top_p, seed);
  Tensor token = call.empty({num_rows}, at::kLong);
  const SampleArgs args{logits.const_data_ptr<float>(), stream.const_data_ptr<int32_t>(),
                        position.const_data_ptr<int32_t>(), temperature.const_data_ptr<float>(),
                        top_k.const_data_ptr<int32_t>(), top_p.const_data_ptr<float>(), seed.const_data_ptr<int64_t>(),
                        token.mutable_data_ptr<int64_t>(), num_rows, vocab_size, num_streams, call.num_threads(),
                        call.rows_in_use(rows_used)};
  const int status = call.run(args);
  if (call.refused(status, kOutOfRange)) expect_parameters(op, args, stream, position);
  call.check(status);
  return token;
}

template <class Device>
Tensor sample_among(const Tensor& words, const Tensor& largest, const Tensor& stream, const Tensor& position,
                    const Tensor& temperature, const Tensor& top_k, const Tensor& top_p, const Tensor& seed,
                    int64_t vocab_size, const OptionalTensor& rows_used) {
  const char* op = "sample_among";
  const Device call(op, "words", words);
  call.expect("words", words, at::kLong, {-1, -1}, "[T, M]");
  const int64_t num_rows = words.size(0);
  expect_range(op, "vocab_size", vocab_size, 1, kMaxSize);
  call.expect("largest", largest, at::kFloat, {num_rows}, "[T]");
  const int64_t num_streams = expect_sampling(call, num_rows, stream, position, temperature, top_k, top_p, seed);
  Tensor word = call.empty({num_rows}, at::kLong);
  const SampleAmongArgs args{
      words.const_data_ptr<int64_t>(), largest.const_data_ptr<float>(), stream.const_data_ptr<int32_t>(),
      position.const_data_ptr<int32_t>(), temperature.const_data_ptr<float>(), top_k.const_data_ptr<int32_t>(),
      top_p.const_data_ptr<float>(), seed.const_data_ptr<int64_t>(), word.mutable_data_ptr<int64_t>(), num_rows,
      words.size(1), vocab_size, num_streams, call.num_threads(), call.rows_in_use(rows_used)};
  const int status = call.run(args);
  if (call.refused(status, kOutOfRange)) expect_parameters(op, args, stream, position);
  call.check(status);
  return word;
}

}  // namespace kdtree::bind
