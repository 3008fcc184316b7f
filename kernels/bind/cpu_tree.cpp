// CPU bindings of the operations on draft trees and of sampling: check, allocate, call the kernel, turn its status into a ValueError.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <cstdlib>
#include <optional>
#include <tuple>
#include <utility>

#include "../sampling.h"
#include "../tree_walk.h"
#include "checks.h"

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

// The first row of [rows, K] log-probs that the kernel marked with NaN.
int64_t first_nan_row(const Tensor& log_probs) {
  const auto* values = log_probs.const_data_ptr<float>();
  int64_t row = 0;
  while (values[row * log_probs.size(-1)] == values[row * log_probs.size(-1)]) ++row;
  return row;
}

Tensors2 draft_topk(const Tensor& logits, int64_t num_candidates) {
  const char* op = "draft_topk";
  expect_dim(op, "logits", logits, 3, "[B, L, V]");
  expect_contiguous(op, "logits", logits);
  const Dtype dtype = float_type(op, "logits", logits);
  const int64_t num_streams = logits.size(0), max_depth = logits.size(1), vocab_size = logits.size(2);
  expect_range(op, "num_candidates", num_candidates, 1, vocab_size);
  Tensor log_probs = new_cpu({num_streams, max_depth, num_candidates}, at::kFloat);
  Tensor token_ids = new_cpu({num_streams, max_depth, num_candidates}, at::kLong);
  const int status = draft_topk_cpu({logits.const_data_ptr(), log_probs.mutable_data_ptr<float>(),
                                     token_ids.mutable_data_ptr<int64_t>(), num_streams * max_depth, vocab_size,
                                     num_candidates, dtype, at::get_num_threads()});
  if (status == kNonFinite) {
    const int64_t row = first_nan_row(log_probs);
    KDTREE_CHECK(false, op, ": logits of stream ", row / max_depth, ", depth ", row % max_depth + 1, ": ",
                 status_text(status));
  }
  expect_ok(op, status);
  return {log_probs, token_ids};
}

// Plain malloc. Torch's allocator asks for 64-byte alignment, for which glibc bypasses its per-thread cache: the six
// arrays of a small tree then take longer to get than to fill. No capture keeps them, so only tree_build may use it.
class MallocAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override {
    void* data = num_bytes ? std::malloc(num_bytes) : nullptr;
    TORCH_CHECK(data || !num_bytes, message("tree_build: could not allocate ", num_bytes, " bytes"));
    return {data, data, &std::free, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* target, const void* source, std::size_t num_bytes) const override {
    default_copy_data(target, source, num_bytes);
  }
};

Tensor new_tree_array(at::IntArrayRef sizes, at::ScalarType type) {
  static MallocAllocator allocator;
  return at::detail::empty_generic(sizes, &allocator, c10::DispatchKeySet(c10::DispatchKey::CPU), type, std::nullopt);
}

Tensors6 tree_build(const Tensor& log_probs, const Tensor& token_ids, const Tensor& bonus, const Tensor& budget,
                    int64_t max_budget) {
  const char* op = "tree_build";
  KDTREE_CHECK(!recording, op, ": expected no capture in progress, got one; build trees outside of it");
  expect_array(op, "log_probs", log_probs, at::kFloat, {-1, -1, -1}, "[B, L, K]");
  const int64_t num_streams = log_probs.size(0), max_depth = log_probs.size(1), num_candidates = log_probs.size(2);
  expect_array(op, "token_ids", token_ids, at::kLong, {num_streams, max_depth, num_candidates}, "[B, L, K]");
  expect_array(op, "bonus", bonus, at::kLong, {num_streams}, "[B]");
  expect_array(op, "budget", budget, at::kInt, {num_streams}, "[B]");
  expect_range(op, "max_budget", max_budget, 0, kMaxBudget);
  const int64_t num_slots = max_budget + 1;
  Tensor token = new_tree_array({num_streams, num_slots}, at::kLong);
  Tensor parent = new_tree_array({num_streams, num_slots}, at::kInt);
  Tensor depth = new_tree_array({num_streams, num_slots}, at::kInt);
  Tensor log_prob = new_tree_array({num_streams, num_slots}, at::kDouble);
  Tensor ancestor_bits = new_tree_array({num_streams, num_slots, num_bit_words(num_slots)}, at::kLong);
  Tensor num_nodes = new_tree_array({num_streams}, at::kInt);
  c10::SmallVector<int32_t, 16> status(num_streams);
  const int worst = tree_build_cpu(
      {log_probs.const_data_ptr<float>(), token_ids.const_data_ptr<int64_t>(), bonus.const_data_ptr<int64_t>(),
       budget.const_data_ptr<int32_t>(), token.mutable_data_ptr<int64_t>(), parent.mutable_data_ptr<int32_t>(),
       depth.mutable_data_ptr<int32_t>(), log_prob.mutable_data_ptr<double>(),
       ancestor_bits.mutable_data_ptr<int64_t>(), num_nodes.mutable_data_ptr<int32_t>(), status.data(), num_streams,
       max_depth, num_candidates, max_budget});
  for (int64_t b = 0; worst != kOk && b < num_streams; ++b) {
    KDTREE_CHECK(status[b] != kOutOfRange, op, ": stream ", b, ": expected a budget in 0 … ", max_budget,
                 " and a bonus token of at least 0, got budget ", budget.const_data_ptr<int32_t>()[b],
                 " and bonus ", bonus.const_data_ptr<int64_t>()[b]);
    KDTREE_CHECK(status[b] == kOk, op, ": stream ", b, ": ", status_text(status[b]));
  }
  return {token, parent, depth, log_prob, ancestor_bits, num_nodes};
}

// The rows of all streams. Counts outside 0 … N raise here, before anything is sized by them.
int64_t total_nodes(const char* op, const Tensor& num_nodes, int64_t num_slots) {
  const auto* counts = num_nodes.const_data_ptr<int32_t>();
  int64_t total = 0;
  for (int64_t b = 0; b < num_nodes.size(0); total += counts[b++])
    expect_range(op, "num_nodes", counts[b], 0, num_slots);
  return total;
}

// A replay of tree_rows: the arrays have room for as many rows as there were.
int tree_rows_again(const TreeRowsArgs& args, int64_t num_rows) {
  int64_t total = 0;
  for (int64_t b = 0; b < args.num_streams; ++b) {
    if (args.num_nodes[b] < 0 || args.num_nodes[b] > args.num_tree_slots) return kOutOfRange;
    total += args.num_nodes[b];
  }
  return total == num_rows ? kdtree::tree_rows_cpu(args) : kOutOfRange;
}

Tensors5 tree_rows(const Tensor& token, const Tensor& depth, const Tensor& num_nodes, const Tensor& prefix_len) {
  const char* op = "tree_rows";
  expect_array(op, "token", token, at::kLong, {-1, -1}, "[B, N]");
  const int64_t num_streams = token.size(0), num_slots = token.size(1);
  expect_array(op, "depth", depth, at::kInt, {num_streams, num_slots}, "[B, N]");
  expect_array(op, "num_nodes", num_nodes, at::kInt, {num_streams}, "[B]");
  expect_array(op, "prefix_len", prefix_len, at::kInt, {num_streams}, "[B]");
  const int64_t num_rows = total_nodes(op, num_nodes, num_slots);
  Tensor row_stream = new_cpu({num_rows}, at::kInt), row_node = new_cpu({num_rows}, at::kInt);
  Tensor row_position = new_cpu({num_rows}, at::kInt), row_slot = new_cpu({num_rows}, at::kInt);
  Tensor row_token = new_cpu({num_rows}, at::kLong);
  const TreeRowsArgs args{token.const_data_ptr<int64_t>(), depth.const_data_ptr<int32_t>(),
                          num_nodes.const_data_ptr<int32_t>(), prefix_len.const_data_ptr<int32_t>(),
                          row_stream.mutable_data_ptr<int32_t>(), row_node.mutable_data_ptr<int32_t>(),
                          row_position.mutable_data_ptr<int32_t>(), row_slot.mutable_data_ptr<int32_t>(),
                          row_token.mutable_data_ptr<int64_t>(), num_streams, num_slots};
  if (recording) recording->calls.emplace_back([args, num_rows] { return tree_rows_again(args, num_rows); });
  expect_ok(op, kdtree::tree_rows_cpu(args));
  return {row_stream, row_node, row_position, row_slot, row_token};
}

Tensors7 tree_rows_padded(const Tensor& token, const Tensor& depth, const Tensor& num_nodes,
                          const Tensor& prefix_len) {
  const char* op = "tree_rows_padded";
  expect_array(op, "token", token, at::kLong, {-1, -1}, "[B, N]");
  const int64_t num_streams = token.size(0), num_slots = token.size(1), num_rows = num_streams * num_slots;
  expect_array(op, "depth", depth, at::kInt, {num_streams, num_slots}, "[B, N]");
  expect_array(op, "num_nodes", num_nodes, at::kInt, {num_streams}, "[B]");
  expect_array(op, "prefix_len", prefix_len, at::kInt, {num_streams}, "[B]");
  Tensor row_stream = new_cpu({num_rows}, at::kInt), row_node = new_cpu({num_rows}, at::kInt);
  Tensor row_position = new_cpu({num_rows}, at::kInt), row_slot = new_cpu({num_rows}, at::kInt);
  Tensor row_token = new_cpu({num_rows}, at::kLong);
  Tensor row_begin = new_cpu({num_streams}, at::kInt), num_used = new_cpu({1}, at::kInt);
  const int status = tree_rows_cpu({token.const_data_ptr<int64_t>(), depth.const_data_ptr<int32_t>(),
                                    num_nodes.const_data_ptr<int32_t>(), prefix_len.const_data_ptr<int32_t>(),
                                    row_stream.mutable_data_ptr<int32_t>(), row_node.mutable_data_ptr<int32_t>(),
                                    row_position.mutable_data_ptr<int32_t>(), row_slot.mutable_data_ptr<int32_t>(),
                                    row_token.mutable_data_ptr<int64_t>(), num_streams, num_slots,
                                    row_begin.mutable_data_ptr<int32_t>(), num_used.mutable_data_ptr<int32_t>()});
  if (status != kOk) total_nodes(op, num_nodes, num_slots);  // raises where a count is what is wrong
  expect_ok(op, status);
  return {row_stream, row_node, row_position, row_slot, row_token, row_begin, num_used};
}

// Raises for the first stream whose rows are not all among the T rows.
void expect_rows_inside(const char* op, const Tensor& row_begin, const Tensor& num_nodes, int64_t num_rows) {
  const auto *begin = row_begin.const_data_ptr<int32_t>(), *count = num_nodes.const_data_ptr<int32_t>();
  for (int64_t b = 0; b < num_nodes.size(0); ++b)
    KDTREE_CHECK(count[b] == 0 || (begin[b] >= 0 && begin[b] + int64_t{count[b]} <= num_rows), op, ": row_begin: stream ",
                 b, ": expected ", count[b], " rows inside the ", num_rows, " of target_token, got the first at ",
                 begin[b]);
}

// Raises unless the tokens of all nodes in use are where tree_accept reads them: by rows where `row_begin` is given.
void expect_targets(const char* op, const Tensor& target_token, const std::optional<Tensor>& row_begin,
                    const Tensor& num_nodes, int64_t num_slots) {
  const int64_t num_streams = num_nodes.size(0);
  if (!row_begin) return expect_array(op, "target_token", target_token, at::kLong, {num_streams, num_slots}, "[B, N]");
  expect_array(op, "target_token", target_token, at::kLong, {-1}, "[T]");
  expect_array(op, "row_begin", *row_begin, at::kInt, {num_streams}, "[B]");
  expect_rows_inside(op, *row_begin, num_nodes, target_token.size(0));
}

Tensors3 tree_accept(const Tensor& token, const Tensor& parent, const Tensor& num_nodes, const Tensor& target_token,
                     int64_t max_depth, const std::optional<Tensor>& row_begin) {
  const char* op = "tree_accept";
  expect_array(op, "token", token, at::kLong, {-1, -1}, "[B, N]");
  const int64_t num_streams = token.size(0), num_slots = token.size(1);
  expect_array(op, "parent", parent, at::kInt, {num_streams, num_slots}, "[B, N]");
  expect_array(op, "num_nodes", num_nodes, at::kInt, {num_streams}, "[B]");
  expect_at_least(op, "max_depth", max_depth, 0);
  total_nodes(op, num_nodes, num_slots);
  expect_targets(op, target_token, row_begin, num_nodes, num_slots);
  Tensor accepted_path = new_cpu({num_streams, max_depth}, at::kInt);
  Tensor num_accepted = new_cpu({num_streams}, at::kInt);
  Tensor next_token = new_cpu({num_streams}, at::kLong);
  const int status = tree_accept_cpu(
      {token.const_data_ptr<int64_t>(), parent.const_data_ptr<int32_t>(), num_nodes.const_data_ptr<int32_t>(),
       target_token.const_data_ptr<int64_t>(), accepted_path.mutable_data_ptr<int32_t>(),
       num_accepted.mutable_data_ptr<int32_t>(), next_token.mutable_data_ptr<int64_t>(), num_streams, num_slots,
       max_depth, row_begin ? row_begin->const_data_ptr<int32_t>() : nullptr});
  KDTREE_CHECK(status != kOutOfRange, op, ": expected max_depth of at least the length of the accepted path, got ",
               max_depth);
  expect_ok(op, status);
  return {accepted_path, num_accepted, next_token};
}

void step_commit(const Tensor& accepted_path, const Tensor& num_accepted, const Tensor& num_nodes,
                 const Tensor& target_token, const Tensor& row_begin, const Tensor& is_stop, const Tensor& prefix_len,
                 const Tensor& bonus, const Tensor& remaining, const Tensor& active, const Tensor& text,
                 const Tensor& ring, const Tensor& step) {
  const char* op = "step_commit";
  expect_array(op, "accepted_path", accepted_path, at::kInt, {-1, -1}, "[S, L]");
  const int64_t num_streams = accepted_path.size(0), max_depth = accepted_path.size(1);
  for (const auto& [name, values] : {std::pair{"num_accepted", &num_accepted}, {"num_nodes", &num_nodes},
                                     {"row_begin", &row_begin}, {"prefix_len", &prefix_len}, {"remaining", &remaining},
                                     {"active", &active}})
    expect_array(op, name, *values, at::kInt, {num_streams}, "[S]");
  expect_array(op, "target_token", target_token, at::kLong, {-1}, "[T]");
  expect_array(op, "is_stop", is_stop, at::kBool, {-1}, "[V]");
  expect_array(op, "bonus", bonus, at::kLong, {num_streams}, "[S]");
  expect_array(op, "text", text, at::kLong, {num_streams, -1}, "[S, P]");
  expect_array(op, "ring", ring, at::kLong, {-1, kRecordToken + 1 + max_depth, num_streams}, "[R, 4 + 1 + L, S]");
  expect_at_least(op, "ring size R", ring.size(0), 1);
  expect_array(op, "step", step, at::kLong, {1}, "[1]");
  const StepCommitArgs args{accepted_path.const_data_ptr<int32_t>(), num_accepted.const_data_ptr<int32_t>(),
                            num_nodes.const_data_ptr<int32_t>(), target_token.const_data_ptr<int64_t>(),
                            row_begin.const_data_ptr<int32_t>(),
                            reinterpret_cast<const uint8_t*>(is_stop.const_data_ptr<bool>()),
                            prefix_len.mutable_data_ptr<int32_t>(), bonus.mutable_data_ptr<int64_t>(),
                            remaining.mutable_data_ptr<int32_t>(), active.mutable_data_ptr<int32_t>(),
                            text.mutable_data_ptr<int64_t>(), ring.mutable_data_ptr<int64_t>(),
                            step.mutable_data_ptr<int64_t>(), num_streams, max_depth, target_token.size(0),
                            is_stop.size(0), text.size(1), ring.size(0)};
  KDTREE_CHECK(*args.step >= 0, op, ": step: expected at least 0, got ", *args.step);
  const int status = bind::step_commit_cpu(args);
  KDTREE_CHECK(status != kOutOfRange, op,
               ": expected accepted nodes below num_nodes, rows and tokens inside their arrays, room in the text, and "
               "active streams that may still emit, got others");
  expect_ok(op, status);
}

// Raises for what sample refused.
void expect_sampling(const char* op, const SampleArgs& a) {
  for (int64_t s = 0; s < a.num_streams; ++s) {
    const float temperature = a.temperature[s];
    KDTREE_CHECK(is_temperature(temperature), op, ": stream ", s, ": temperature: expected 0 or a finite number of at "
                 "least 2^-126, got ", temperature);
    KDTREE_CHECK(is_top_k(a.top_k[s]), op, ": stream ", s, ": top_k: expected 0 (all) … ", kMaxTopK, ", got ",
                 a.top_k[s]);
    KDTREE_CHECK(is_top_p(a.top_p[s]), op, ": stream ", s, ": top_p: expected above 0 and at most 1, got ",
                 a.top_p[s]);
  }
}

Tensor sample(const Tensor& logits, const Tensor& stream, const Tensor& position, const Tensor& temperature,
              const Tensor& top_k, const Tensor& top_p, const Tensor& seed, const OptionalTensor& rows_used) {
  const char* op = "sample";
  expect_array(op, "logits", logits, at::kFloat, {-1, -1}, "[T, V]");
  const int64_t num_rows = logits.size(0), vocab_size = logits.size(1);
  expect_at_least(op, "vocabulary size V", vocab_size, 1);
  expect_array(op, "stream", stream, at::kInt, {num_rows}, "[T]");
  expect_array(op, "position", position, at::kInt, {num_rows}, "[T]");
  expect_array(op, "temperature", temperature, at::kFloat, {-1}, "[S]");
  const int64_t num_streams = temperature.size(0);
  expect_array(op, "top_k", top_k, at::kInt, {num_streams}, "[S]");
  expect_array(op, "top_p", top_p, at::kFloat, {num_streams}, "[S]");
  expect_array(op, "seed", seed, at::kLong, {num_streams}, "[S]");
  Tensor token = new_cpu({num_rows}, at::kLong);
  const SampleArgs args{logits.const_data_ptr<float>(), stream.const_data_ptr<int32_t>(),
                        position.const_data_ptr<int32_t>(), temperature.const_data_ptr<float>(),
                        top_k.const_data_ptr<int32_t>(), top_p.const_data_ptr<float>(), seed.const_data_ptr<int64_t>(),
                        token.mutable_data_ptr<int64_t>(), num_rows, vocab_size, num_streams, at::get_num_threads(),
                        rows_in_use(op, rows_used)};
  const int status = bind::sample_cpu(args);
  if (status == kOutOfRange) {
    expect_sampling(op, args);
    expect_values<int32_t>(op, "stream", stream, 0, num_streams - 1);
    expect_values<int32_t>(op, "position", position, 0, INT32_MAX);
  }
  expect_ok(op, status);
  return token;
}

}  // namespace

KDTREE_LIBRARY_IMPL(KDTREE_NS, CPU, m) {
  m.impl("draft_topk", &draft_topk);
  m.impl("tree_build", &tree_build);
  m.impl("tree_rows", &tree_rows);
  m.impl("tree_rows_padded", &tree_rows_padded);
  m.impl("tree_accept", &tree_accept);
  m.impl("step_commit", &step_commit);
  m.impl("sample", &sample);
}

}  // namespace kdtree::bind
