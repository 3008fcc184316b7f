// CPU bindings of the model's operations: check, allocate, call the kernel, turn its status into a ValueError.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

#include "../partials.h"
#include "checks.h"

#define KDTREE_LIBRARY_IMPL_(ns, key, m) TORCH_LIBRARY_IMPL(ns, key, m)
#define KDTREE_LIBRARY_IMPL(ns, key, m) KDTREE_LIBRARY_IMPL_(ns, key, m)

namespace kdtree::bind {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr int64_t kPackedOutputs = 16;

int64_t num_packed_blocks(int64_t num_out) { return (num_out + kPackedOutputs - 1) / kPackedOutputs; }

const void* data_or_null(const OptionalTensor& t) { return t ? t->const_data_ptr() : nullptr; }

Tensor embed(const Tensor& weight, const Tensor& token, const OptionalTensor& rows_used) {
  const char* op = "embed";
  const Dtype dtype = float_type(op, "weight", weight);
  expect_array(op, "weight", weight, weight.scalar_type(), {-1, -1}, "[V, D]");
  expect_array(op, "token", token, at::kLong, {-1}, "[T]");
  const int64_t num_rows = token.size(0), vocab_size = weight.size(0), dim = weight.size(1);
  Tensor out = new_cpu({num_rows, dim}, weight.scalar_type());
  const int status = embed_cpu({weight.const_data_ptr(), token.const_data_ptr<int64_t>(), out.mutable_data_ptr(),
                                num_rows, vocab_size, dim, dtype, at::get_num_threads(), rows_in_use(op, rows_used)});
  if (status == kOutOfRange) expect_values<int64_t>(op, "token", token, 0, vocab_size - 1);
  expect_ok(op, status);
  return out;
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps, const OptionalTensor& rows_used) {
  const char* op = "rms_norm";
  const Dtype dtype = float_type(op, "x", x);
  expect_dim(op, "x", x, 2, "[T, D]");
  expect_dense_rows(op, "x", x);
  const int64_t num_rows = x.size(0), dim = x.size(1);
  expect_array(op, "weight", weight, x.scalar_type(), {dim}, "[D]");
  Tensor out = new_cpu({num_rows, dim}, x.scalar_type());
  expect_ok(op, rms_norm_cpu({x.const_data_ptr(), weight.const_data_ptr(), out.mutable_data_ptr(), num_rows, dim,
                              x.stride(0), float(eps), dtype, at::get_num_threads(), rows_in_use(op, rows_used)}));
  return out;
}

Tensor pack_linear(const Tensor& weight) {
  const char* op = "pack_linear";
  const Dtype dtype = float_type(op, "weight", weight);
  expect_array(op, "weight", weight, weight.scalar_type(), {-1, -1, -1}, "[G, N, K]");
  const int64_t num_groups = weight.size(0), num_out = weight.size(1), num_in = weight.size(2);
  Tensor packed = new_cpu({num_groups, num_packed_blocks(num_out), num_in, kPackedOutputs}, weight.scalar_type());
  expect_ok(op, pack_linear_cpu({weight.const_data_ptr(), packed.mutable_data_ptr(), num_groups, num_out, num_in,
                                 dtype, at::get_num_threads()}));
  return packed;
}

// A weight of products, packed floats or INT4. Whether it is INT4.
bool expect_weight(const char* op, const char* name, const Tensor& t, at::ScalarType type, int64_t num_groups,
                   int64_t num_out, int64_t num_in, const char* symbols) {
  expect_device(op, name, t, at::kCPU);
  if (is_int4(op, name, t, type, num_groups, num_out, num_in)) return true;
  expect_array(op, name, t, type, {num_groups, num_packed_blocks(num_out), num_in, kPackedOutputs}, symbols);
  return false;
}

Tensor linear(const Tensor& x, const Tensor& packed, int64_t num_out, const OptionalTensor& residual, bool out_f32,
              const OptionalTensor& rows_used, bool, int64_t whole_in, int64_t first_segment, int64_t num_segments) {
  const char* op = "linear";
  const Dtype dtype = float_type(op, "x", x);
  expect_dim(op, "x", x, 2, "[T, K]");
  expect_dense_rows(op, "x", x);
  const int64_t num_rows = x.size(0), num_in = x.size(1);
  expect_range(op, "num_out", num_out, 0, kMaxSize);
  const bool int4 = expect_weight(op, "packed", packed, x.scalar_type(), 1, num_out, num_in, "[1, ceil(N/16), K, 16]");
  const Dtype out_dtype = out_f32 ? kF32 : dtype;
  if (residual) {
    expect_array(op, "residual", *residual, x.scalar_type(), {num_rows, num_out}, "[T, N]");
    KDTREE_CHECK(out_dtype == dtype, op, ": residual: expected none with BFloat16 inputs and out_f32, got one");
  }
  const SegmentShare share = expect_share(op, "whole_in", num_in, whole_in, first_segment, num_segments);
  KDTREE_CHECK(share.count == 0 || (out_dtype == kF32 && !residual), op,
               ": num_segments: expected out_f32 and no residual with a share of the segments, got others");
  Tensor out = new_cpu({num_rows, num_out}, scalar_type(out_dtype));
  expect_ok(op, linear_cpu({x.const_data_ptr(), packed.const_data_ptr(), data_or_null(residual),
                            out.mutable_data_ptr(), num_rows, 1, num_out, num_in, x.stride(0), 0, dtype, out_dtype,
                            at::get_num_threads(), rows_in_use(op, rows_used), false, int4, share.whole, share.first,
                            share.count}));
  return out;
}

Tensor linear_heads(const Tensor& x, const Tensor& packed, int64_t num_out, const OptionalTensor& rows_used, bool) {
  const char* op = "linear_heads";
  const Dtype dtype = float_type(op, "x", x);
  expect_dim(op, "x", x, 3, "[T, G, K]");
  expect_dense_rows(op, "x", x);
  const int64_t num_rows = x.size(0), num_groups = x.size(1), num_in = x.size(2);
  expect_range(op, "num_out", num_out, 0, kMaxSize);
  const bool int4 =
      expect_weight(op, "packed", packed, x.scalar_type(), num_groups, num_out, num_in, "[G, ceil(N/16), K, 16]");
  Tensor out = new_cpu({num_rows, num_groups, num_out}, x.scalar_type());
  expect_ok(op, linear_cpu({x.const_data_ptr(), packed.const_data_ptr(), nullptr, out.mutable_data_ptr(), num_rows,
                            num_groups, num_out, num_in, x.stride(0), x.stride(1), dtype, dtype,
                            at::get_num_threads(), rows_in_use(op, rows_used), false, int4}));
  return out;
}

Tensor rope(const Tensor& x, const Tensor& cos_sin, const Tensor& position, const OptionalTensor& rows_used) {
  const char* op = "rope";
  const Dtype dtype = float_type(op, "x", x);
  expect_dim(op, "x", x, 3, "[T, H, R]");
  expect_dense_rows(op, "x", x);
  const int64_t num_rows = x.size(0), num_heads = x.size(1), dim = x.size(2);
  KDTREE_CHECK(dim % 2 == 0, op, ": x: expected an even last dimension R, got ", dim);
  expect_array(op, "cos_sin", cos_sin, at::kFloat, {-1, dim}, "[P, R]");
  expect_array(op, "position", position, at::kInt, {num_rows}, "[T]");
  Tensor out = new_cpu({num_rows, num_heads, dim}, x.scalar_type());
  const int status = rope_cpu({x.const_data_ptr(), cos_sin.const_data_ptr<float>(), position.const_data_ptr<int32_t>(),
                               out.mutable_data_ptr(), num_rows, num_heads, dim, cos_sin.size(0), x.stride(0),
                               x.stride(1), dtype, at::get_num_threads(), rows_in_use(op, rows_used)});
  if (status == kOutOfRange) expect_values<int32_t>(op, "position", position, 0, cos_sin.size(0) - 1);
  expect_ok(op, status);
  return out;
}

Tensor swiglu(const Tensor& gate_up, const OptionalTensor& rows_used) {
  const char* op = "swiglu";
  const Dtype dtype = float_type(op, "gate_up", gate_up);
  expect_array(op, "gate_up", gate_up, gate_up.scalar_type(), {-1, -1}, "[T, 2I]");
  KDTREE_CHECK(gate_up.size(1) % 2 == 0, op, ": gate_up: expected an even last dimension 2I, got ",
               gate_up.size(1));
  const int64_t num_rows = gate_up.size(0), dim = gate_up.size(1) / 2;
  Tensor out = new_cpu({num_rows, dim}, gate_up.scalar_type());
  expect_ok(op, swiglu_cpu({gate_up.const_data_ptr(), out.mutable_data_ptr(), num_rows, dim, dtype,
                            at::get_num_threads(), rows_in_use(op, rows_used)}));
  return out;
}

Tensor residual_add(const Tensor& x, const Tensor& y, const OptionalTensor& rows_used) {
  const char* op = "residual_add";
  const Dtype dtype = float_type(op, "x", x);
  expect_array(op, "x", x, x.scalar_type(), {-1, -1}, "[T, D]");
  const int64_t num_rows = x.size(0), dim = x.size(1);
  expect_array(op, "y", y, x.scalar_type(), {num_rows, dim}, "[T, D]");
  Tensor out = new_cpu({num_rows, dim}, x.scalar_type());
  expect_ok(op, residual_add_cpu({x.const_data_ptr(), y.const_data_ptr(), out.mutable_data_ptr(), num_rows, dim, dtype,
                                  at::get_num_threads(), rows_in_use(op, rows_used)}));
  return out;
}

Tensor add_partials(const Tensor& partials, const OptionalTensor& residual, bool bf16, const OptionalTensor& rows_used) {
  const char* op = "add_partials";
  expect_array(op, "partials", partials, at::kFloat, {-1, -1, -1}, "[P, T, N]");
  const int64_t num_partials = partials.size(0), num_rows = partials.size(1), dim = partials.size(2);
  KDTREE_CHECK(is_num_partials(num_partials), op, ": partials: expected those of 1, 2, 4 or 8 ranks, got ", num_partials);
  const Dtype dtype = bf16 ? kBF16 : kF32;
  if (residual) expect_array(op, "residual", *residual, scalar_type(dtype), {num_rows, dim}, "[T, N]");
  Tensor out = new_cpu({num_rows, dim}, scalar_type(dtype));
  expect_ok(op, add_partials_cpu({partials.const_data_ptr<float>(), data_or_null(residual), out.mutable_data_ptr(),
                                  num_partials, num_rows, dim, dtype, at::get_num_threads(), rows_in_use(op, rows_used)}));
  return out;
}

Tensor argmax(const Tensor& logits, const OptionalTensor& rows_used) {
  const char* op = "argmax";
  expect_array(op, "logits", logits, at::kFloat, {-1, -1}, "[T, V]");
  const int64_t num_rows = logits.size(0), vocab_size = logits.size(1);
  expect_at_least(op, "vocabulary size V", vocab_size, 1);
  Tensor token = new_cpu({num_rows}, at::kLong);
  expect_ok(op, argmax_cpu({logits.const_data_ptr<float>(), token.mutable_data_ptr<int64_t>(), num_rows, vocab_size,
                            at::get_num_threads(), rows_in_use(op, rows_used)}));
  return token;
}

std::tuple<Tensor, Tensor> moe_route(const Tensor& logits, const OptionalTensor& bias, int64_t top_k, int64_t scoring,
                                     bool renormalize, double scaling_factor, const OptionalTensor& rows_used,
                                     int64_t num_groups, int64_t topk_groups) {
  const char* op = "moe_route";
  expect_array(op, "logits", logits, at::kFloat, {-1, -1}, "[T, E]");
  const int64_t num_rows = logits.size(0), num_experts = logits.size(1);
  if (bias) expect_array(op, "bias", *bias, at::kFloat, {num_experts}, "[E]");
  expect_range(op, "top_k", top_k, 1, num_experts);
  expect_range(op, "scoring", scoring, kSoftmax, kSigmoid);
  expect_groups(op, num_experts, top_k, num_groups, topk_groups);
  Tensor expert_id = new_cpu({num_rows, top_k}, at::kInt), weight = new_cpu({num_rows, top_k}, at::kFloat);
  expect_ok(op, moe_route_cpu({logits.const_data_ptr<float>(), bias ? bias->const_data_ptr<float>() : nullptr,
                               expert_id.mutable_data_ptr<int32_t>(), weight.mutable_data_ptr<float>(), num_rows,
                               num_experts, top_k, Scoring(scoring), renormalize, float(scaling_factor), num_groups,
                               topk_groups, rows_in_use(op, rows_used)}));
  return {expert_id, weight};
}

Tensor moe_experts(const Tensor& x, const Tensor& gate_up, const Tensor& down, const OptionalTensor& shared_gate_up,
                   const OptionalTensor& shared_down, const Tensor& expert_id, const Tensor& weight, int64_t width,
                   int64_t shared_width, const OptionalTensor& residual, const OptionalTensor& rows_used,
                   int64_t whole_width, int64_t whole_shared_width, int64_t first_segment, int64_t num_segments) {
  const char* op = "moe_experts";
  const Dtype dtype = float_type(op, "x", x);
  const auto type = x.scalar_type();
  expect_array(op, "x", x, type, {-1, -1}, "[T, D]");
  const bool is_share = num_segments != 0;
  expect_range(op, "width", width, is_share ? 0 : 1, kMaxSize);
  expect_share(op, "whole_width", width, whole_width, first_segment, num_segments);
  expect_share(op, "whole_shared_width", shared_width, whole_shared_width, first_segment, num_segments);
  KDTREE_CHECK(!is_share || !residual, op, ": residual: expected none with a share of the segments, got one");
  KDTREE_CHECK(gate_up.dim() > 0, op, ": gate_up: expected the experts' weights, got a scalar");
  const int64_t num_rows = x.size(0), dim = x.size(1), num_experts = gate_up.size(0);
  const bool int4 = expect_weight(op, "gate_up", gate_up, type, num_experts, 2 * width, dim, "[E, ceil(2I/16), D, 16]");
  KDTREE_CHECK(expect_weight(op, "down", down, type, num_experts, dim, width, "[E, ceil(D/16), I, 16]") == int4, op,
               ": down: expected weights of the type of gate_up, got ", down.scalar_type());
  KDTREE_CHECK(shared_gate_up.has_value() == shared_down.has_value(), op,
               ": expected shared_gate_up and shared_down together or neither, got one");
  if (shared_gate_up) {
    expect_range(op, "shared_width", shared_width, is_share ? 0 : 1, kMaxSize);
    expect_array(op, "shared_gate_up", *shared_gate_up, type,
                 {1, num_packed_blocks(2 * shared_width), dim, kPackedOutputs}, "[1, ceil(2S/16), D, 16]");
    expect_array(op, "shared_down", *shared_down, type, {1, num_packed_blocks(dim), shared_width, kPackedOutputs},
                 "[1, ceil(D/16), S, 16]");
  }
  expect_array(op, "expert_id", expert_id, at::kInt, {num_rows, -1}, "[T, top_k]");
  const int64_t top_k = expert_id.size(1);
  expect_array(op, "weight", weight, at::kFloat, {num_rows, top_k}, "[T, top_k]");
  if (residual) expect_array(op, "residual", *residual, type, {num_rows, dim}, "[T, D]");
  Tensor out = new_cpu({num_rows, dim}, is_share ? at::kFloat : type);
  const int status = moe_experts_cpu(
      {x.const_data_ptr(), gate_up.const_data_ptr(), down.const_data_ptr(), data_or_null(shared_gate_up),
       data_or_null(shared_down), expert_id.const_data_ptr<int32_t>(), weight.const_data_ptr<float>(),
       data_or_null(residual), out.mutable_data_ptr(), num_rows, dim, num_experts, top_k, width, shared_width, dtype,
       at::get_num_threads(), rows_in_use(op, rows_used), nullptr, int4, whole_width, whole_shared_width,
       int32_t(first_segment), int32_t(num_segments)});
  if (status == kOutOfRange) expect_values<int32_t>(op, "expert_id", expert_id, 0, num_experts - 1);
  expect_ok(op, status);
  return out;
}

void cache_append(const Tensor& cache, const Tensor& latent, const Tensor& k_rope, const Tensor& stream,
                  const Tensor& slot, const OptionalTensor& rows_used) {
  const char* op = "cache_append";
  const Dtype dtype = float_type(op, "cache", cache);
  const auto type = cache.scalar_type();
  expect_array(op, "cache", cache, type, {-1, -1, -1}, "[S, P, C+R]");
  expect_array(op, "latent", latent, type, {-1, -1}, "[T, C]");
  const int64_t num_rows = latent.size(0), latent_dim = latent.size(1), rope_dim = cache.size(2) - latent_dim;
  KDTREE_CHECK(rope_dim >= 0, op, ": latent: expected at most the ", cache.size(2), " values of a slot, got ",
               latent_dim);
  expect_array(op, "k_rope", k_rope, type, {num_rows, rope_dim}, "[T, R] with C+R of the cache");
  expect_array(op, "stream", stream, at::kInt, {num_rows}, "[T]");
  expect_array(op, "slot", slot, at::kInt, {num_rows}, "[T]");
  const int status = cache_append_cpu({cache.mutable_data_ptr(), latent.const_data_ptr(), k_rope.const_data_ptr(),
                                       stream.const_data_ptr<int32_t>(), slot.const_data_ptr<int32_t>(), num_rows,
                                       cache.size(0), cache.size(1), latent_dim, rope_dim, dtype,
                                       rows_in_use(op, rows_used)});
  if (status == kOutOfRange) {
    expect_values<int32_t>(op, "stream", stream, 0, cache.size(0) - 1);
    expect_values<int32_t>(op, "slot", slot, 0, cache.size(1) - 1);
  }
  expect_ok(op, status);
}

void cache_compact(const Tensor& cache, const Tensor& prefix_len, const Tensor& accepted_path,
                   const Tensor& num_accepted) {
  const char* op = "cache_compact";
  const Dtype dtype = float_type(op, "cache", cache);
  expect_array(op, "cache", cache, cache.scalar_type(), {-1, -1, -1, -1}, "[layers, S, P, C+R]");
  const int64_t num_streams = cache.size(1), num_slots = cache.size(2);
  expect_array(op, "prefix_len", prefix_len, at::kInt, {num_streams}, "[S]");
  expect_array(op, "accepted_path", accepted_path, at::kInt, {num_streams, -1}, "[S, L]");
  expect_array(op, "num_accepted", num_accepted, at::kInt, {num_streams}, "[S]");
  const int64_t max_depth = accepted_path.size(1);
  const int status = cache_compact_cpu({cache.mutable_data_ptr(), prefix_len.const_data_ptr<int32_t>(),
                                        accepted_path.const_data_ptr<int32_t>(),
                                        num_accepted.const_data_ptr<int32_t>(), cache.size(0), num_streams, num_slots,
                                        cache.size(3), max_depth, dtype});
  if (status == kOutOfRange) {
    expect_values<int32_t>(op, "num_accepted", num_accepted, 0, max_depth);
    expect_values<int32_t>(op, "prefix_len", prefix_len, 0, num_slots);
    KDTREE_CHECK(false, op, ": expected accepted nodes at slots below ", num_slots,
                 ", got a prefix_len + node past the cache");
  }
  KDTREE_CHECK(status != kInvalidTree, op,
               ": accepted_path: expected node indices of at least 1 that ascend along the path, got others");
  expect_ok(op, status);
}

Tensor verify_attn(const Tensor& q_latent, const Tensor& q_rope, const Tensor& cache, const Tensor& stream,
                   const Tensor& node, const Tensor& parent, const Tensor& depth, const Tensor& prefix_len,
                   double scale, const OptionalTensor& rows_used) {
  const char* op = "verify_attn";
  const Dtype dtype = float_type(op, "q_latent", q_latent);
  const auto type = q_latent.scalar_type();
  expect_array(op, "q_latent", q_latent, type, {-1, -1, -1}, "[T, H, C]");
  const int64_t num_rows = q_latent.size(0), num_heads = q_latent.size(1), latent_dim = q_latent.size(2);
  expect_array(op, "q_rope", q_rope, type, {num_rows, num_heads, -1}, "[T, H, R]");
  const int64_t rope_dim = q_rope.size(2);
  expect_array(op, "cache", cache, type, {-1, -1, latent_dim + rope_dim}, "[S, P, C+R]");
  const int64_t num_streams = cache.size(0), num_slots = cache.size(1);
  expect_array(op, "stream", stream, at::kInt, {num_rows}, "[T]");
  expect_array(op, "node", node, at::kInt, {num_rows}, "[T]");
  expect_array(op, "parent", parent, at::kInt, {num_streams, -1}, "[S, N]");
  const int64_t num_tree_slots = parent.size(1);
  expect_array(op, "depth", depth, at::kInt, {num_streams, num_tree_slots}, "[S, N]");
  expect_array(op, "prefix_len", prefix_len, at::kInt, {num_streams}, "[S]");
  Tensor out = new_cpu({num_rows, num_heads, latent_dim}, type);
  const int status = verify_attn_cpu(
      {q_latent.const_data_ptr(), q_rope.const_data_ptr(), cache.const_data_ptr(), stream.const_data_ptr<int32_t>(),
       node.const_data_ptr<int32_t>(), parent.const_data_ptr<int32_t>(), depth.const_data_ptr<int32_t>(),
       prefix_len.const_data_ptr<int32_t>(), out.mutable_data_ptr(), num_rows, num_heads, latent_dim, rope_dim,
       num_streams, num_slots, num_tree_slots, float(scale), dtype, at::get_num_threads(), rows_in_use(op, rows_used)});
  if (status == kOutOfRange) {
    expect_values<int32_t>(op, "stream", stream, 0, num_streams - 1);
    expect_values<int32_t>(op, "node", node, 0, num_tree_slots - 1);
    expect_values<int32_t>(op, "prefix_len", prefix_len, 0, num_slots);
    KDTREE_CHECK(false, op, ": expected tree nodes at slots below ", num_slots,
                 ", got a prefix_len + node past the cache");
  }
  expect_ok(op, status);
  return out;
}

}  // namespace

KDTREE_LIBRARY_IMPL(KDTREE_NS, CPU, m) {
  m.impl("embed", &embed);
  m.impl("rms_norm", &rms_norm);
  m.impl("pack_linear", &pack_linear);
  m.impl("linear", &linear);
  m.impl("linear_heads", &linear_heads);
  m.impl("rope", &rope);
  m.impl("swiglu", &swiglu);
  m.impl("residual_add", &residual_add);
  m.impl("add_partials", &add_partials);
  m.impl("argmax", &argmax);
  m.impl("moe_route", &moe_route);
  m.impl("moe_experts", &moe_experts);
  m.impl("cache_append", &cache_append);
  m.impl("cache_compact", &cache_compact);
  m.impl("verify_attn", &verify_attn);
}

}  // namespace kdtree::bind
