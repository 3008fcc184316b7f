// Bindings of the operations on draft trees: check, allocate, call the kernel, turn its status into a ValueError. On a GPU
// values are not checked, see cuda_call.h: a row of NaN or +inf logits gives NaN log-probs there, and candidates, budgets
// and bonus tokens that tree_build refuses give a tree of 0 nodes.
#pragma once
#include <utility>

#include "../tree_walk.h"
#include "call.h"

namespace kdtree::bind {

using Tensors2 = std::tuple<Tensor, Tensor>;
using Tensors3 = std::tuple<Tensor, Tensor, Tensor>;
using Tensors5 = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
using Tensors6 = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using Tensors7 = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

template <class Device>
Tensors6 tree_build(const Tensor& log_probs, const Tensor& token_ids, const Tensor& bonus, const Tensor& budget,
                    int64_t max_budget) {
  const char* op = "tree_build";
  const Device call(op, "log_probs", log_probs);
  call.expect("log_probs", log_probs, at::kFloat, {-1, -1, -1}, "[B, L, K]");
  const int64_t num_streams = log_probs.size(0), max_depth = log_probs.size(1), num_candidates = log_probs.size(2);
  call.expect("token_ids", token_ids, at::kLong, {num_streams, max_depth, num_candidates}, "[B, L, K]");
  call.expect("bonus", bonus, at::kLong, {num_streams}, "[B]");
  call.expect("budget", budget, at::kInt, {num_streams}, "[B]");
  expect_range(op, "max_budget", max_budget, 0, kMaxBudget);
  const int64_t num_slots = max_budget + 1;
  Tensor token = call.empty_of_tree({num_streams, num_slots}, at::kLong);
  Tensor parent = call.empty_of_tree({num_streams, num_slots}, at::kInt);
  Tensor depth = call.empty_of_tree({num_streams, num_slots}, at::kInt);
  Tensor log_prob = call.empty_of_tree({num_streams, num_slots}, at::kDouble);
  Tensor ancestor_bits = call.empty_of_tree({num_streams, num_slots, num_bit_words(num_slots)}, at::kLong);
  Tensor num_nodes = call.empty_of_tree({num_streams}, at::kInt);
  typename Device::Statuses statuses(call, num_streams);
  const int32_t* status = statuses.data();
  const int worst = call.run(TreeBuildArgs{
      log_probs.const_data_ptr<float>(), token_ids.const_data_ptr<int64_t>(), bonus.const_data_ptr<int64_t>(),
      budget.const_data_ptr<int32_t>(), token.mutable_data_ptr<int64_t>(), parent.mutable_data_ptr<int32_t>(),
      depth.mutable_data_ptr<int32_t>(), log_prob.mutable_data_ptr<double>(), ancestor_bits.mutable_data_ptr<int64_t>(),
      num_nodes.mutable_data_ptr<int32_t>(), statuses.data(), num_streams, max_depth, num_candidates, max_budget});
  for (int64_t b = 0; Device::kReadsValues && worst != kOk && b < num_streams; ++b) {
    KDTREE_CHECK(status[b] != kOutOfRange, op, ": stream ", b, ": expected a budget in 0 … ", max_budget,
                 " and a bonus token of at least 0, got budget ", budget.const_data_ptr<int32_t>()[b],
                 " and bonus ", bonus.const_data_ptr<int64_t>()[b]);
    KDTREE_CHECK(status[b] == kOk, op, ": stream ", b, ": ", status_text(status[b]));
  }
  call.check(worst);
  return {token, parent, depth, log_prob, ancestor_bits, num_nodes};
}

// What tree_rows and tree_rows_padded take, checked.
template <class Device>
void expect_trees(const Device& call, const Tensor& token, const Tensor& depth, const Tensor& num_nodes,
                  const Tensor& prefix_len) {
  call.expect("token", token, at::kLong, {-1, -1}, "[B, N]");
  const int64_t num_streams = token.size(0), num_slots = token.size(1);
  call.expect("depth", depth, at::kInt, {num_streams, num_slots}, "[B, N]");
  call.expect("num_nodes", num_nodes, at::kInt, {num_streams}, "[B]");
  call.expect("prefix_len", prefix_len, at::kInt, {num_streams}, "[B]");
}

// The five arrays that describe num_rows rows, and the args that have them filled.
template <class Device>
std::pair<Tensors5, TreeRowsArgs> rows_of(const Device& call, const Tensor& token, const Tensor& depth,
                                          const Tensor& num_nodes, const Tensor& prefix_len, int64_t num_rows) {
  Tensor row_stream = call.empty({num_rows}, at::kInt), row_node = call.empty({num_rows}, at::kInt);
  Tensor row_position = call.empty({num_rows}, at::kInt), row_slot = call.empty({num_rows}, at::kInt);
  Tensor row_token = call.empty({num_rows}, at::kLong);
  const TreeRowsArgs args{token.const_data_ptr<int64_t>(), depth.const_data_ptr<int32_t>(),
                          num_nodes.const_data_ptr<int32_t>(), prefix_len.const_data_ptr<int32_t>(),
                          row_stream.mutable_data_ptr<int32_t>(), row_node.mutable_data_ptr<int32_t>(),
                          row_position.mutable_data_ptr<int32_t>(), row_slot.mutable_data_ptr<int32_t>(),
                          row_token.mutable_data_ptr<int64_t>(), token.size(0), token.size(1)};
  return {{row_stream, row_node, row_position, row_slot, row_token}, args};
}

// Raises where tree_rows has refused what follows a prefix: a slot's number is an i32.
template <class Device>
void check_rows(const Device& call, int status, const Tensor& prefix_len, int64_t num_slots) {
  if (call.refused(status, kOutOfRange))
    expect_values<int32_t>(call.op(), "prefix_len", prefix_len, 0, INT32_MAX - num_slots);
  call.check(status);
}

template <class Device>
Tensors5 tree_rows(const Tensor& token, const Tensor& depth, const Tensor& num_nodes, const Tensor& prefix_len) {
  const Device call("tree_rows", "token", token);
  expect_trees(call, token, depth, num_nodes, prefix_len);
  const int64_t num_rows = call.total_nodes(num_nodes, token.size(1));
  const auto [rows, args] = rows_of(call, token, depth, num_nodes, prefix_len, num_rows);
  check_rows(call, call.run_for_rows(args, num_rows), prefix_len, token.size(1));
  return rows;
}

template <class Device>
Tensors7 tree_rows_padded(const Tensor& token, const Tensor& depth, const Tensor& num_nodes,
                          const Tensor& prefix_len) {
  const Device call("tree_rows_padded", "token", token);
  expect_trees(call, token, depth, num_nodes, prefix_len);
  auto [rows, args] = rows_of(call, token, depth, num_nodes, prefix_len, token.size(0) * token.size(1));
  Tensor row_begin = call.empty({token.size(0)}, at::kInt), num_used = call.empty({1}, at::kInt);
  args.row_begin = row_begin.mutable_data_ptr<int32_t>();
  args.num_rows_device = num_used.mutable_data_ptr<int32_t>();
  const int status = call.run(args);
  if (Device::kReadsValues && status != kOk) call.total_nodes(num_nodes, token.size(1));  // raises where it is a count
  check_rows(call, status, prefix_len, token.size(1));
  return std::tuple_cat(std::move(rows), std::make_tuple(row_begin, num_used));
}

// Raises for the first stream whose rows are not all among the T rows.
inline void expect_rows_inside(const char* op, const Tensor& row_begin, const Tensor& num_nodes, int64_t num_rows) {
  const auto *begin = row_begin.const_data_ptr<int32_t>(), *count = num_nodes.const_data_ptr<int32_t>();
  for (int64_t b = 0; b < num_nodes.size(0); ++b)
    KDTREE_CHECK(count[b] == 0 || (begin[b] >= 0 && begin[b] + int64_t{count[b]} <= num_rows), op, ": row_begin: stream ",
                 b, ": expected ", count[b], " rows inside the ", num_rows, " of target_token, got the first at ",
                 begin[b]);
}

template <class Device>
Tensors3 tree_accept(const Tensor& token, const Tensor& parent, const Tensor& num_nodes, const Tensor& target_token,
                     int64_t max_depth, const OptionalTensor& row_begin) {
  const char* op = "tree_accept";
  const Device call(op, "token", token);
  call.expect("token", token, at::kLong, {-1, -1}, "[B, N]");
  const int64_t num_streams = token.size(0), num_slots = token.size(1);
  call.expect("parent", parent, at::kInt, {num_streams, num_slots}, "[B, N]");
  call.expect("num_nodes", num_nodes, at::kInt, {num_streams}, "[B]");
  expect_at_least(op, "max_depth", max_depth, 0);
  if (Device::kReadsValues) call.total_nodes(num_nodes, num_slots);
  if (row_begin) {  // the tokens of all nodes lie where their rows do
    call.expect("target_token", target_token, at::kLong, {-1}, "[T]");
    call.expect("row_begin", *row_begin, at::kInt, {num_streams}, "[B]");
    if (Device::kReadsValues) expect_rows_inside(op, *row_begin, num_nodes, target_token.size(0));
  } else {
    call.expect("target_token", target_token, at::kLong, {num_streams, num_slots}, "[B, N]");
  }
  Tensor accepted_path = call.empty({num_streams, max_depth}, at::kInt);
  Tensor num_accepted = call.empty({num_streams}, at::kInt);
  Tensor next_token = call.empty({num_streams}, at::kLong);
  const int status = call.run(TreeAcceptArgs{
      token.const_data_ptr<int64_t>(), parent.const_data_ptr<int32_t>(), num_nodes.const_data_ptr<int32_t>(),
      target_token.const_data_ptr<int64_t>(), accepted_path.mutable_data_ptr<int32_t>(),
      num_accepted.mutable_data_ptr<int32_t>(), next_token.mutable_data_ptr<int64_t>(), num_streams, num_slots,
      max_depth, row_begin ? row_begin->const_data_ptr<int32_t>() : nullptr});
  KDTREE_CHECK(!call.refused(status, kOutOfRange), op,
               ": expected max_depth of at least the length of the accepted path, got ", max_depth);
  call.check(status);
  return {accepted_path, num_accepted, next_token};
}

template <class Device>
void step_commit(const Tensor& accepted_path, const Tensor& num_accepted, const Tensor& num_nodes,
                 const Tensor& target_token, const Tensor& row_begin, const Tensor& is_stop, const Tensor& prefix_len,
                 const Tensor& bonus, const Tensor& remaining, const Tensor& active, const Tensor& text,
                 const Tensor& ring, const Tensor& step) {
  const char* op = "step_commit";
  const Device call(op, "accepted_path", accepted_path);
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
  if (Device::kReadsValues) expect_range(op, "step", *args.step, 0, INT64_MAX - 1);
  const int status = call.run(args);
  KDTREE_CHECK(!call.refused(status, kOutOfRange), op,
               ": expected accepted nodes below num_nodes, rows and tokens inside their arrays, room in the text, and "
               "active streams that may still emit, got others");
  call.check(status);
}

}  // namespace kdtree::bind
