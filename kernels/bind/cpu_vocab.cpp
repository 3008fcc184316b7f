// CPU bindings of the operations on a vocabulary that ranks share: check, allocate, call.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

#include "vocab_sizes.h"

#define KDTREE_LIBRARY_IMPL_(ns, key, m) TORCH_LIBRARY_IMPL(ns, key, m)
#define KDTREE_LIBRARY_IMPL(ns, key, m) KDTREE_LIBRARY_IMPL_(ns, key, m)

namespace kdtree::bind {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

Tensor draft_topk_share(const Tensor& logits, int64_t num_candidates, int64_t whole_vocab, int64_t first_segment,
                        int64_t num_segments) {
  const char* op = "draft_topk_share";
  expect_device(op, "logits", logits, at::kCPU);
  const Dtype dtype = float_type(op, "logits", logits);
  const auto share = expect_vocab_share(op, logits, num_candidates, whole_vocab, first_segment, num_segments);
  Tensor words = new_cpu({logits.size(0), logits.size(1), num_candidates + num_segments}, at::kLong);
  expect_ok(op, draft_topk_cpu({logits.const_data_ptr(), nullptr, nullptr, logits.size(0) * logits.size(1), logits.size(2),
                                num_candidates, dtype, at::get_num_threads(), nullptr, words.mutable_data_ptr<int64_t>(),
                                share.whole, share.first, share.count}));
  return words;
}

std::tuple<Tensor, Tensor> draft_topk_merge(const Tensor& words, int64_t num_candidates) {
  const char* op = "draft_topk_merge";
  expect_device(op, "words", words, at::kCPU);
  const int64_t P = expect_topk_words(op, words, num_candidates), max_depth = words.size(2);
  Tensor log_probs = new_cpu({words.size(1), max_depth, num_candidates}, at::kFloat);
  Tensor token_ids = new_cpu({words.size(1), max_depth, num_candidates}, at::kLong);
  const int status =
      draft_topk_merge_cpu({words.const_data_ptr<int64_t>(), log_probs.mutable_data_ptr<float>(),
                            token_ids.mutable_data_ptr<int64_t>(), P, words.size(1) * max_depth, num_candidates,
                            at::get_num_threads()});
  if (status == kNonFinite) {
    int64_t row = 0;
    while (token_ids.const_data_ptr<int64_t>()[row * num_candidates] >= 0) ++row;
    KDTREE_CHECK(false, "draft_topk: logits of stream ", row / max_depth, ", depth ", row % max_depth + 1, ": ",
                 status_text(status));
  }
  expect_ok(op, status);
  return {log_probs, token_ids};
}

Tensor sample_among(const Tensor& words, const Tensor& largest, const Tensor& stream, const Tensor& position,
                    const Tensor& temperature, const Tensor& top_k, const Tensor& top_p, const Tensor& seed,
                    int64_t vocab_size, const OptionalTensor& rows_used) {
  const char* op = "sample_among";
  expect_array(op, "words", words, at::kLong, {-1, -1}, "[T, M]");
  const int64_t num_rows = words.size(0), num_streams = temperature.numel();
  expect_range(op, "vocab_size", vocab_size, 1, kMaxSize);
  expect_array(op, "largest", largest, at::kFloat, {num_rows}, "[T]");
  expect_array(op, "stream", stream, at::kInt, {num_rows}, "[T]");
  expect_array(op, "position", position, at::kInt, {num_rows}, "[T]");
  expect_array(op, "temperature", temperature, at::kFloat, {num_streams}, "[S]");
  expect_array(op, "top_k", top_k, at::kInt, {num_streams}, "[S]");
  expect_array(op, "top_p", top_p, at::kFloat, {num_streams}, "[S]");
  expect_array(op, "seed", seed, at::kLong, {num_streams}, "[S]");
  Tensor word = new_cpu({num_rows}, at::kLong);
  expect_ok(op, sample_among_cpu({words.const_data_ptr<int64_t>(), largest.const_data_ptr<float>(),
                                  stream.const_data_ptr<int32_t>(), position.const_data_ptr<int32_t>(),
                                  temperature.const_data_ptr<float>(), top_k.const_data_ptr<int32_t>(),
                                  top_p.const_data_ptr<float>(), seed.const_data_ptr<int64_t>(),
                                  word.mutable_data_ptr<int64_t>(), num_rows, words.size(1), vocab_size, num_streams,
                                  at::get_num_threads(), rows_in_use(op, rows_used)}));
  return word;
}

}  // namespace

KDTREE_LIBRARY_IMPL(KDTREE_NS, CPU, m) {
  m.impl("draft_topk_share", &draft_topk_share);
  m.impl("draft_topk_merge", &draft_topk_merge);
  m.impl("sample_among", &sample_among);
}

}  // namespace kdtree::bind
