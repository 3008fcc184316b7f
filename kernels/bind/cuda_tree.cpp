// CUDA bindings of the operations on draft trees and of sampling: check, allocate, launch. Values are not checked on the
// host, which would have to wait for them: a row of NaN or +inf logits gives NaN log-probs, candidates, budgets and bonus
// tokens that tree_build refuses give a tree of 0 nodes, and parameters that sample refuses give token -1.
#include <torch/library.h>

#include <optional>
#include <tuple>
#include <utility>

#include "../tree_walk.h"
#include "cuda_call.h"

#define KDTREE_LIBRARY_IMPL_(ns, key, m) TORCH_LIBRARY_IMPL(ns, key, m)
#define KDTREE_LIBRARY_IMPL(ns, key, m) KDTREE_LIBRARY_IMPL_(ns, key, m)

namespace kdtree::bind {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Tensors2 = std::tuple<Tensor, Tensor>;
using Tensors3 = std::tuple<Tensor, Tensor, Tensor>;
using Tensors5 = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
using Tensors6 = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using Tensors7 = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Tensors2 draft_topk(const Tensor& logits, int64_t num_candidates) {
  const char* op = "draft_topk";
  const CudaCall call(op, "logits", logits);
  expect_dim(op, "logits", logits, 3, "[B, L, V]");
  expect_contiguous(op, "logits", logits);
  const Dtype dtype = float_type(op, "logits", logits);
  const int64_t num_streams = logits.size(0), max_depth = logits.size(1), vocab_size = logits.size(2);
  expect_range(op, "num_candidates", num_candidates, 1, vocab_size);
  Tensor log_probs = call.empty({num_streams, max_depth, num_candidates}, at::kFloat);
  Tensor token_ids = call.empty({num_streams, max_depth, num_candidates}, at::kLong);
  DraftTopkArgs args{logits.const_data_ptr(), log_probs.mutable_data_ptr<float>(),
                     token_ids.mutable_data_ptr<int64_t>(), num_streams * max_depth, vocab_size, num_candidates, dtype};
  const Tensor workspace = call.workspace(draft_topk_cuda_workspace_bytes(args));
  args.workspace = workspace.mutable_data_ptr();
  call.check(draft_topk_cuda(args, call.stream()));
  return {log_probs, token_ids};
}

Tensors6 tree_build(const Tensor& log_probs, const Tensor& token_ids, const Tensor& bonus, const Tensor& budget,
                    int64_t max_budget) {
  const char* op = "tree_build";
  const CudaCall call(op, "log_probs", log_probs);
  call.expect("log_probs", log_probs, at::kFloat, {-1, -1, -1}, "[B, L, K]");
  const int64_t num_streams = log_probs.size(0), max_depth = log_probs.size(1), num_candidates = log_probs.size(2);
  call.expect("token_ids", token_ids, at::kLong, {num_streams, max_depth, num_candidates}, "[B, L, K]");
  call.expect("bonus", bonus, at::kLong, {num_streams}, "[B]");
  call.expect("budget", budget, at::kInt, {num_streams}, "[B]");
  expect_range(op, "max_budget", max_budget, 0, kMaxBudget);
  const int64_t num_slots = max_budget + 1;
  Tensor token = call.empty({num_streams, num_slots}, at::kLong);
  Tensor parent = call.empty({num_streams, num_slots}, at::kInt);
  Tensor depth = call.empty({num_streams, num_slots}, at::kInt);
  Tensor log_prob = call.empty({num_streams, num_slots}, at::kDouble);
  Tensor ancestor_bits = call.empty({num_streams, num_slots, num_bit_words(num_slots)}, at::kLong);
  Tensor num_nodes = call.empty({num_streams}, at::kInt), status = call.empty({num_streams}, at::kInt);
  call.check(tree_build_cuda(
      {log_probs.const_data_ptr<float>(), token_ids.const_data_ptr<int64_t>(), bonus.const_data_ptr<int64_t>(),
       budget.const_data_ptr<int32_t>(), token.mutable_data_ptr<int64_t>(), parent.mutable_data_ptr<int32_t>(),
       depth.mutable_data_ptr<int32_t>(), log_prob.mutable_data_ptr<double>(),
       ancestor_bits.mutable_data_ptr<int64_t>(), num_nodes.mutable_data_ptr<int32_t>(),
       status.mutable_data_ptr<int32_t>(), num_streams, max_depth, num_candidates, max_budget},
      call.stream()));
  return {token, parent, depth, log_prob, ancestor_bits, num_nodes};
}

// The rows of all streams, which size the result: the one number for which the host waits.
int64_t total_nodes(const char* op, const CudaCall& call, const Tensor& num_nodes, int64_t num_slots) {
  c10::SmallVector<int32_t, 16> counts(num_nodes.size(0));
  const auto stream = static_cast<cudaStream_t>(call.stream());
  const size_t num_bytes = counts.size() * sizeof(int32_t);
  auto error = cudaMemcpyAsync(counts.data(), num_nodes.const_data_ptr(), num_bytes, cudaMemcpyDeviceToHost, stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  TORCH_CHECK(error == cudaSuccess, op, ": CUDA error: ", cudaGetErrorString(error));
  int64_t total = 0;
  for (const int32_t count : counts) {
    expect_range(op, "num_nodes", count, 0, num_slots);
    total += count;
  }
  return total;
}

Tensors5 tree_rows(const Tensor& token, const Tensor& depth, const Tensor& num_nodes, const Tensor& prefix_len) {
  const char* op = "tree_rows";
  const CudaCall call(op, "token", token);
  call.expect("token", token, at::kLong, {-1, -1}, "[B, N]");
  const int64_t num_streams = token.size(0), num_slots = token.size(1);
  call.expect("depth", depth, at::kInt, {num_streams, num_slots}, "[B, N]");
  call.expect("num_nodes", num_nodes, at::kInt, {num_streams}, "[B]");
  call.expect("prefix_len", prefix_len, at::kInt, {num_streams}, "[B]");
  const int64_t num_rows = total_nodes(op, call, num_nodes, num_slots);
  Tensor row_stream = call.empty({num_rows}, at::kInt), row_node = call.empty({num_rows}, at::kInt);
  Tensor row_position = call.empty({num_rows}, at::kInt), row_slot = call.empty({num_rows}, at::kInt);
  Tensor row_token = call.empty({num_rows}, at::kLong);
  call.check(tree_rows_cuda({token.const_data_ptr<int64_t>(), depth.const_data_ptr<int32_t>(),
                             num_nodes.const_data_ptr<int32_t>(), prefix_len.const_data_ptr<int32_t>(),
                             row_stream.mutable_data_ptr<int32_t>(), row_node.mutable_data_ptr<int32_t>(),
                             row_position.mutable_data_ptr<int32_t>(), row_slot.mutable_data_ptr<int32_t>(),
                             row_token.mutable_data_ptr<int64_t>(), num_streams, num_slots},
                            call.stream()));
  return {row_stream, row_node, row_position, row_slot, row_token};
}

Tensors7 tree_rows_padded(const Tensor& token, const Tensor& depth, const Tensor& num_nodes,
                          const Tensor& prefix_len) {
  const char* op = "tree_rows_padded";
  const CudaCall call(op, "token", token);
  call.expect("token", token, at::kLong, {-1, -1}, "[B, N]");
  const int64_t num_streams = token.size(0), num_slots = token.size(1), num_rows = num_streams * num_slots;
  call.expect("depth", depth, at::kInt, {num_streams, num_slots}, "[B, N]");
  call.expect("num_nodes", num_nodes, at::kInt, {num_streams}, "[B]");
  call.expect("prefix_len", prefix_len, at::kInt, {num_streams}, "[B]");
  Tensor row_stream = call.empty({num_rows}, at::kInt), row_node = call.empty({num_rows}, at::kInt);
  Tensor row_position = call.empty({num_rows}, at::kInt), row_slot = call.empty({num_rows}, at::kInt);
  Tensor row_token = call.empty({num_rows}, at::kLong);
  Tensor row_begin = call.empty({num_streams}, at::kInt), num_used = call.empty({1}, at::kInt);
  call.check(tree_rows_cuda({token.const_data_ptr<int64_t>(), depth.const_data_ptr<int32_t>(),
                             num_nodes.const_data_ptr<int32_t>(), prefix_len.const_data_ptr<int32_t>(),
                             row_stream.mutable_data_ptr<int32_t>(), row_node.mutable_data_ptr<int32_t>(),
                             row_position.mutable_data_ptr<int32_t>(), row_slot.mutable_data_ptr<int32_t>(),
                             row_token.mutable_data_ptr<int64_t>(), num_streams, num_slots,
                             row_begin.mutable_data_ptr<int32_t>(), num_used.mutable_data_ptr<int32_t>()},
                            call.stream()));
  return {row_stream, row_node, row_position, row_slot, row_token, row_begin, num_used};
}

Tensors3 tree_accept(const Tensor& token, const Tensor& parent, const Tensor& num_nodes, const Tensor& target_token,
                     int64_t max_depth, const std::optional<Tensor>& row_begin) {
  const char* op = "tree_accept";
  const CudaCall call(op, "token", token);
  call.expect("token", token, at::kLong, {-1, -1}, "[B, N]");
  const int64_t num_streams = token.size(0), num_slots = token.size(1);
  call.expect("parent", parent, at::kInt, {num_streams, num_slots}, "[B, N]");
  call.expect("num_nodes", num_nodes, at::kInt, {num_streams}, "[B]");
  if (row_begin) {
    call.expect("target_token", target_token, at::kLong, {-1}, "[T]");
    call.expect("row_begin", *row_begin, at::kInt, {num_streams}, "[B]");
  } else {
    call.expect("target_token", target_token, at::kLong, {num_streams, num_slots}, "[B, N]");
  }
  expect_at_least(op, "max_depth", max_depth, 0);
  Tensor accepted_path = call.empty({num_streams, max_depth}, at::kInt);
  Tensor num_accepted = call.empty({num_streams}, at::kInt);
  Tensor next_token = call.empty({num_streams}, at::kLong);
  call.check(tree_accept_cuda(
      {token.const_data_ptr<int64_t>(), parent.const_data_ptr<int32_t>(), num_nodes.const_data_ptr<int32_t>(),
       target_token.const_data_ptr<int64_t>(), accepted_path.mutable_data_ptr<int32_t>(),
       num_accepted.mutable_data_ptr<int32_t>(), next_token.mutable_data_ptr<int64_t>(), num_streams, num_slots,
       max_depth, row_begin ? row_begin->const_data_ptr<int32_t>() : nullptr},
      call.stream()));
  return {accepted_path, num_accepted, next_token};
}

void step_commit(const Tensor& accepted_path, const Tensor& num_accepted, const Tensor& num_nodes,
                 const Tensor& target_token, const Tensor& row_begin, const Tensor& is_stop, const Tensor& prefix_len,
                 const Tensor& bonus, const Tensor& remaining, const Tensor& active, const Tensor& text,
                 const Tensor& ring, const Tensor& step) {
  const char* op = "step_commit";
  const CudaCall call(op, "accepted_path", accepted_path);
  call.expect("accepted_path", accepted_path, at::kInt, {-1, -1}, "[S, L]");
  const int64_t num_streams = accepted_path.size(0), max_depth = accepted_path.size(1);
  for (const auto& [name, values] : {std::pair{"num_accepted", &num_accepted}, {"num_nodes", &num_nodes},
                                     {"row_begin", &row_begin}, {"prefix_len", &prefix_len}, {"remaining", &remaining},
                                     {"active", &active}})
    call.expect(name, *values, at::kInt, {num_streams}, "[S]");
  call.expect("target_token", target_token, at::kLong, {-1}, "[T]");
  call.expect("is_stop", is_stop, at::kBool, {-1}, "[V]");
  call.expect("bonus", bonus, at::kLong, {num_streams}, "[S]");
  call.expect("text", text, at::kLong, {num_streams, -1}, "[S, P]");
  call.expect("ring", ring, at::kLong, {-1, kRecordToken + 1 + max_depth, num_streams}, "[R, 4 + 1 + L, S]");
  expect_at_least(op, "ring size R", ring.size(0), 1);
  call.expect("step", step, at::kLong, {1}, "[1]");
  const StepCommitArgs args{accepted_path.const_data_ptr<int32_t>(), num_accepted.const_data_ptr<int32_t>(),
                            num_nodes.const_data_ptr<int32_t>(), target_token.const_data_ptr<int64_t>(),
                            row_begin.const_data_ptr<int32_t>(),
                            reinterpret_cast<const uint8_t*>(is_stop.const_data_ptr<bool>()),
                            prefix_len.mutable_data_ptr<int32_t>(), bonus.mutable_data_ptr<int64_t>(),
                            remaining.mutable_data_ptr<int32_t>(), active.mutable_data_ptr<int32_t>(),
                            text.mutable_data_ptr<int64_t>(), ring.mutable_data_ptr<int64_t>(),
                            step.mutable_data_ptr<int64_t>(), num_streams, max_depth, target_token.size(0),
                            is_stop.size(0), text.size(1), ring.size(0)};
  call.check(step_commit_cuda(args, call.stream()));
}

Tensor sample(const Tensor& logits, const Tensor& stream, const Tensor& position, const Tensor& temperature,
              const Tensor& top_k, const Tensor& top_p, const Tensor& seed, const OptionalTensor& rows_used) {
  const char* op = "sample";
  const CudaCall call(op, "logits", logits);
  call.expect("logits", logits, at::kFloat, {-1, -1}, "[T, V]");
  const int64_t num_rows = logits.size(0), vocab_size = logits.size(1);
  expect_at_least(op, "vocabulary size V", vocab_size, 1);
  call.expect("stream", stream, at::kInt, {num_rows}, "[T]");
  call.expect("position", position, at::kInt, {num_rows}, "[T]");
  call.expect("temperature", temperature, at::kFloat, {-1}, "[S]");
  const int64_t num_streams = temperature.size(0);
  call.expect("top_k", top_k, at::kInt, {num_streams}, "[S]");
  call.expect("top_p", top_p, at::kFloat, {num_streams}, "[S]");
  call.expect("seed", seed, at::kLong, {num_streams}, "[S]");
  Tensor token = call.empty({num_rows}, at::kLong);
  call.check(sample_cuda({logits.const_data_ptr<float>(), stream.const_data_ptr<int32_t>(),
                          position.const_data_ptr<int32_t>(), temperature.const_data_ptr<float>(),
                          top_k.const_data_ptr<int32_t>(), top_p.const_data_ptr<float>(),
                          seed.const_data_ptr<int64_t>(), token.mutable_data_ptr<int64_t>(), num_rows, vocab_size,
                          num_streams, 0, call.rows_in_use(rows_used)},
                         call.stream()));
  return token;
}

}  // namespace

KDTREE_LIBRARY_IMPL(KDTREE_NS, CUDA, m) {
  m.impl("draft_topk", &draft_topk);
  m.impl("tree_build", &tree_build);
  m.impl("tree_rows", &tree_rows);
  m.impl("tree_rows_padded", &tree_rows_padded);
  m.impl("tree_accept", &tree_accept);
  m.impl("step_commit", &step_commit);
  m.impl("sample", &sample);
}

}  // namespace kdtree::bind
