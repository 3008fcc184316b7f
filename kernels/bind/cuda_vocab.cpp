// CUDA bindings of the operations on a vocabulary that ranks share: check, allocate, launch.
#include <torch/library.h>

#include <optional>
#include <tuple>

#include "cuda_call.h"
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
  const CudaCall call(op, "logits", logits);
  const Dtype dtype = float_type(op, "logits", logits);
  const auto share = expect_vocab_share(op, logits, num_candidates, whole_vocab, first_segment, num_segments);
  Tensor words = call.empty({logits.size(0), logits.size(1), num_candidates + num_segments}, at::kLong);
  DraftTopkArgs args{logits.const_data_ptr(), nullptr, nullptr, logits.size(0) * logits.size(1), logits.size(2),
                     num_candidates, dtype, 0, nullptr, words.mutable_data_ptr<int64_t>(), share.whole, share.first,
                     share.count};
  const Tensor workspace = call.workspace(draft_topk_cuda_workspace_bytes(args));
  args.workspace = workspace.mutable_data_ptr();
  call.check(draft_topk_cuda(args, call.stream()));
  return words;
}

std::tuple<Tensor, Tensor> draft_topk_merge(const Tensor& words, int64_t num_candidates) {
  const char* op = "draft_topk_merge";
  const CudaCall call(op, "words", words);
  const int64_t P = expect_topk_words(op, words, num_candidates);
  Tensor log_probs = call.empty({words.size(1), words.size(2), num_candidates}, at::kFloat);
  Tensor token_ids = call.empty({words.size(1), words.size(2), num_candidates}, at::kLong);
  call.check(draft_topk_merge_cuda({words.const_data_ptr<int64_t>(), log_probs.mutable_data_ptr<float>(),
                                    token_ids.mutable_data_ptr<int64_t>(), P, words.size(1) * words.size(2), num_candidates},
                                   call.stream()));
  return {log_probs, token_ids};
}

Tensor sample_among(const Tensor& words, const Tensor& largest, const Tensor& stream, const Tensor& position,
                    const Tensor& temperature, const Tensor& top_k, const Tensor& top_p, const Tensor& seed,
                    int64_t vocab_size, const OptionalTensor& rows_used) {
  const char* op = "sample_among";
  const CudaCall call(op, "words", words);
  call.expect("words", words, at::kLong, {-1, -1}, "[T, M]");
  const int64_t num_rows = words.size(0), num_streams = temperature.numel();
  expect_range(op, "vocab_size", vocab_size, 1, kMaxSize);
  call.expect("largest", largest, at::kFloat, {num_rows}, "[T]");
  call.expect("stream", stream, at::kInt, {num_rows}, "[T]");
  call.expect("position", position, at::kInt, {num_rows}, "[T]");
  call.expect("temperature", temperature, at::kFloat, {num_streams}, "[S]");
  call.expect("top_k", top_k, at::kInt, {num_streams}, "[S]");
  call.expect("top_p", top_p, at::kFloat, {num_streams}, "[S]");
  call.expect("seed", seed, at::kLong, {num_streams}, "[S]");
  Tensor word = call.empty({num_rows}, at::kLong);
  call.check(sample_among_cuda(
      {words.const_data_ptr<int64_t>(), largest.const_data_ptr<float>(), stream.const_data_ptr<int32_t>(),
       position.const_data_ptr<int32_t>(), temperature.const_data_ptr<float>(), top_k.const_data_ptr<int32_t>(),
       top_p.const_data_ptr<float>(), seed.const_data_ptr<int64_t>(), word.mutable_data_ptr<int64_t>(), num_rows,
       words.size(1), vocab_size, num_streams, 0, call.rows_in_use(rows_used)},
      call.stream()));
  return word;
}

}  // namespace

KDTREE_LIBRARY_IMPL(KDTREE_NS, CUDA, m) {
  m.impl("draft_topk_share", &draft_topk_share);
  m.impl("draft_topk_merge", &draft_topk_merge);
  m.impl("sample_among", &sample_among);
}

}  // namespace kdtree::bind
