// Bindings of the model's operations: check, allocate, call the kernel, turn its status into a ValueError. On a GPU
// values are not checked, see cuda_call.h: a token, position, expert or row outside its array gives a row of NaN there,
// and nothing is written or moved outside the cache.
#pragma once
#include "../partials.h"
#include "call.h"

namespace kdtree::bind {

template <class Device>
Tensor embed(const Tensor& weight, const Tensor& token, const OptionalTensor& rows_used) {
  const Device call("embed", "weight", weight);
  const Dtype dtype = float_type(call.op(), "weight", weight);
  call.expect("weight", weight, weight.scalar_type(), {-1, -1}, "[V, D]");
  call.expect("token", token, at::kLong, {-1}, "[T]");
  const int64_t num_rows = token.size(0), vocab_size = weight.size(0), dim = weight.size(1);
  Tensor out = call.empty({num_rows, dim}, weight.scalar_type());
  const int status = call.run(EmbedArgs{weight.const_data_ptr(), token.const_data_ptr<int64_t>(), out.mutable_data_ptr(),
                                        num_rows, vocab_size, dim, dtype, call.num_threads(),
                                        call.rows_in_use(rows_used)});
  if (call.refused(status, kOutOfRange)) expect_values<int64_t>(call.op(), "token", token, 0, vocab_size - 1);
  call.check(status);
  return out;
}

inline void expect_eps(const char* op, double eps) {
  expect_finite(op, "eps", eps);
  KDTREE_CHECK(eps >= 0, op, ": eps: expected at least 0, got ", eps);
}

template <class Device>
Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps, const OptionalTensor& rows_used, bool settled) {
  const Device call("rms_norm", "x", x);
  const Dtype dtype = float_type(call.op(), "x", x);
  call.expect_rows("x", x, 2, "[T, D]");
  const int64_t num_rows = x.size(0), dim = x.size(1);
  call.expect("weight", weight, x.scalar_type(), {dim}, "[D]");
  expect_eps(call.op(), eps);
  Tensor out = call.empty({num_rows, dim}, x.scalar_type());
  call.check(call.run(RmsNormArgs{x.const_data_ptr(), weight.const_data_ptr(), out.mutable_data_ptr(), num_rows, dim,
                                  x.stride(0), float(eps), dtype, call.num_threads(), call.rows_in_use(rows_used),
                                  settled}));
  return out;
}

template <class Device>
Tensor pack_linear(const Tensor& weight) {
  const Device call("pack_linear", "weight", weight);
  const Dtype dtype = float_type(call.op(), "weight", weight);
  call.expect("weight", weight, weight.scalar_type(), {-1, -1, -1}, "[G, N, K]");
  const int64_t num_groups = weight.size(0), num_out = weight.size(1), num_in = weight.size(2);
  Tensor packed = call.empty(Device::packed_sizes(num_groups, num_out, num_in), weight.scalar_type());
  call.check(call.run(PackLinearArgs{weight.const_data_ptr(), packed.mutable_data_ptr(), num_groups, num_out, num_in,
                                     dtype, call.num_threads()}));
  return packed;
}

template <class Device>
Tensor linear(const Tensor& x, const Tensor& packed, int64_t num_out, const OptionalTensor& residual, bool out_f32,
              const OptionalTensor& rows_used, bool settled, int64_t whole_in, int64_t first_segment,
              int64_t num_segments) {
  const char* op = "linear";
  const Device call(op, "x", x);
  const Dtype dtype = float_type(op, "x", x);
  call.expect_rows("x", x, 2, "[T, K]");
  const int64_t num_rows = x.size(0), num_in = x.size(1);
  expect_range(op, "num_out", num_out, 0, kMaxSize);
  const bool int4 =
      call.expect_weight("packed", packed, x.scalar_type(), 1, num_out, num_in, "[1, ceil(N/16), K, 16]");
  const Dtype out_dtype = out_f32 ? kF32 : dtype;
  if (residual) {
    call.expect("residual", *residual, x.scalar_type(), {num_rows, num_out}, "[T, N]");
    KDTREE_CHECK(out_dtype == dtype, op, ": residual: expected none with BFloat16 inputs and out_f32, got one");
  }
  const SegmentShare share = expect_share(op, "whole_in", num_in, whole_in, first_segment, num_segments);
  KDTREE_CHECK(share.count == 0 || (out_dtype == kF32 && !residual), op,
               ": num_segments: expected out_f32 and no residual with a share of the segments, got others");
  Tensor out = call.empty({num_rows, num_out}, scalar_type(out_dtype));
  call.check(call.run(LinearArgs{x.const_data_ptr(), packed.const_data_ptr(), data_or_null(residual),
                                 out.mutable_data_ptr(), num_rows, 1, num_out, num_in, x.stride(0), 0, dtype, out_dtype,
                                 call.num_threads(), call.rows_in_use(rows_used), settled, int4, share.whole,
                                 share.first, share.count}));
  return out;
}

template <class Device>
Tensor linear_heads(const Tensor& x, const Tensor& packed, int64_t num_out, const OptionalTensor& rows_used,
                    bool settled) {
  const Device call("linear_heads", "x", x);
  const Dtype dtype = float_type(call.op(), "x", x);
  call.expect_rows("x", x, 3, "[T, G, K]");
  const int64_t num_rows = x.size(0), num_groups = x.size(1), num_in = x.size(2);
  expect_range(call.op(), "num_out", num_out, 0, kMaxSize);
  const bool int4 =
      call.expect_weight("packed", packed, x.scalar_type(), num_groups, num_out, num_in, "[G, ceil(N/16), K, 16]");
  Tensor out = call.empty({num_rows, num_groups, num_out}, x.scalar_type());
  call.check(call.run(LinearArgs{x.const_data_ptr(), packed.const_data_ptr(), nullptr, out.mutable_data_ptr(), num_rows,
                                 num_groups, num_out, num_in, x.stride(0), x.stride(1), dtype, dtype,
                                 call.num_threads(), call.rows_in_use(rows_used), settled, int4}));
  return out;
}

template <class Device>
Tensor rope(const Tensor& x, const Tensor& cos_sin, const Tensor& position, const OptionalTensor& rows_used) {
  const char* op = "rope";
  const Device call(op, "x", x);
  const Dtype dtype = float_type(op, "x", x);
  call.expect_rows("x", x, 3, "[T, H, R]");
  const int64_t num_rows = x.size(0), num_heads = x.size(1), dim = x.size(2);
  KDTREE_CHECK(dim % 2 == 0, op, ": x: expected an even last dimension R, got ", dim);
  call.expect("cos_sin", cos_sin, at::kFloat, {-1, dim}, "[P, R]");
  call.expect("position", position, at::kInt, {num_rows}, "[T]");
  Tensor out = call.empty({num_rows, num_heads, dim}, x.scalar_type());
  const int status = call.run(RopeArgs{x.const_data_ptr(), cos_sin.const_data_ptr<float>(),
                                       position.const_data_ptr<int32_t>(), out.mutable_data_ptr(), num_rows, num_heads,
                                       dim, cos_sin.size(0), x.stride(0), x.stride(1), dtype, call.num_threads(),
                                       call.rows_in_use(rows_used)});
  if (call.refused(status, kOutOfRange)) expect_values<int32_t>(op, "position", position, 0, cos_sin.size(0) - 1);
  call.check(status);
  return out;
}

template <class Device>
Tensor swiglu(const Tensor& gate_up, const OptionalTensor& rows_used) {
  const char* op = "swiglu";
  const Device call(op, "gate_up", gate_up);
  const Dtype dtype = float_type(op, "gate_up", gate_up);
  call.expect("gate_up", gate_up, gate_up.scalar_type(), {-1, -1}, "[T, 2I]");
  KDTREE_CHECK(gate_up.size(1) % 2 == 0, op, ": gate_up: expected an even last dimension 2I, got ", gate_up.size(1));
  const int64_t num_rows = gate_up.size(0), dim = gate_up.size(1) / 2;
  Tensor out = call.empty({num_rows, dim}, gate_up.scalar_type());
  call.check(call.run(SwigluArgs{gate_up.const_data_ptr(), out.mutable_data_ptr(), num_rows, dim, dtype,
                                 call.num_threads(), call.rows_in_use(rows_used)}));
  return out;
}

template <class Device>
Tensor residual_add(const Tensor& x, const Tensor& y, const OptionalTensor& rows_used) {
  const Device call("residual_add", "x", x);
  const Dtype dtype = float_type(call.op(), "x", x);
  call.expect("x", x, x.scalar_type(), {-1, -1}, "[T, D]");
  const int64_t num_rows = x.size(0), dim = x.size(1);
  call.expect("y", y, x.scalar_type(), {num_rows, dim}, "[T, D]");
  Tensor out = call.empty({num_rows, dim}, x.scalar_type());
  call.check(call.run(ResidualAddArgs{x.const_data_ptr(), y.const_data_ptr(), out.mutable_data_ptr(), num_rows, dim,
                                      dtype, call.num_threads(), call.rows_in_use(rows_used)}));
  return out;
}

template <class Device>
Tensor add_partials(const Tensor& partials, const OptionalTensor& residual, bool bf16, const OptionalTensor& rows_used) {
  const char* op = "add_partials";
  const Device call(op, "partials", partials);
  call.expect("partials", partials, at::kFloat, {-1, -1, -1}, "[P, T, N]");
  const int64_t num_partials = partials.size(0), num_rows = partials.size(1), dim = partials.size(2);
  KDTREE_CHECK(is_num_partials(num_partials), op, ": partials: expected those of 1, 2, 4 or 8 ranks, got ", num_partials);
  const Dtype dtype = bf16 ? kBF16 : kF32;
  if (residual) call.expect("residual", *residual, scalar_type(dtype), {num_rows, dim}, "[T, N]");
  Tensor out = call.empty({num_rows, dim}, scalar_type(dtype));
  call.check(call.run(AddPartialsArgs{partials.const_data_ptr<float>(), data_or_null(residual), out.mutable_data_ptr(),
                                      num_partials, num_rows, dim, dtype, call.num_threads(),
                                      call.rows_in_use(rows_used)}));
  return out;
}

template <class Device>
Tensor argmax(const Tensor& logits, const OptionalTensor& rows_used) {
  const Device call("argmax", "logits", logits);
  call.expect("logits", logits, at::kFloat, {-1, -1}, "[T, V]");
  const int64_t num_rows = logits.size(0), vocab_size = logits.size(1);
  expect_at_least(call.op(), "vocabulary size V", vocab_size, 1);
  Tensor token = call.empty({num_rows}, at::kLong);
  call.check(call.run(ArgmaxArgs{logits.const_data_ptr<float>(), token.mutable_data_ptr<int64_t>(), num_rows,
                                 vocab_size, call.num_threads(), call.rows_in_use(rows_used)}));
  return token;
}

template <class Device>
std::tuple<Tensor, Tensor> moe_route(const Tensor& logits, const OptionalTensor& bias, int64_t top_k, int64_t scoring,
                                     bool renormalize, double scaling_factor, const OptionalTensor& rows_used,
                                     int64_t num_groups, int64_t topk_groups) {
  const char* op = "moe_route";
  const Device call(op, "logits", logits);
  call.expect("logits", logits, at::kFloat, {-1, -1}, "[T, E]");
  const int64_t num_rows = logits.size(0), num_experts = logits.size(1);
  if (bias) call.expect("bias", *bias, at::kFloat, {num_experts}, "[E]");
  expect_range(op, "top_k", top_k, 1, num_experts);
  expect_range(op, "scoring", scoring, kSoftmax, kSigmoid);
  expect_groups(op, num_experts, top_k, num_groups, topk_groups);
  expect_finite(op, "scaling_factor", scaling_factor);
  Tensor expert_id = call.empty({num_rows, top_k}, at::kInt), weight = call.empty({num_rows, top_k}, at::kFloat);
  call.check(call.run(MoeRouteArgs{logits.const_data_ptr<float>(), bias ? bias->const_data_ptr<float>() : nullptr,
                                   expert_id.mutable_data_ptr<int32_t>(), weight.mutable_data_ptr<float>(), num_rows,
                                   num_experts, top_k, Scoring(scoring), renormalize, float(scaling_factor), num_groups,
                                   topk_groups, call.rows_in_use(rows_used)}));
  return {expert_id, weight};
}

template <class Device>
Tensor moe_experts(const Tensor& x, const Tensor& gate_up, const Tensor& down, const OptionalTensor& shared_gate_up,
                   const OptionalTensor& shared_down, const Tensor& expert_id, const Tensor& weight, int64_t width,
                   int64_t shared_width, const OptionalTensor& residual, const OptionalTensor& rows_used,
                   int64_t whole_width, int64_t whole_shared_width, int64_t first_segment, int64_t num_segments) {
  const char* op = "moe_experts";
  const Device call(op, "x", x);
  const Dtype dtype = float_type(op, "x", x);
  const auto type = x.scalar_type();
  call.expect("x", x, type, {-1, -1}, "[T, D]");
  const bool is_share = num_segments != 0;
  expect_range(op, "width", width, is_share ? 0 : 1, kMaxSize);
  expect_share(op, "whole_width", width, whole_width, first_segment, num_segments);
  expect_share(op, "whole_shared_width", shared_width, whole_shared_width, first_segment, num_segments);
  KDTREE_CHECK(!is_share || !residual, op, ": residual: expected none with a share of the segments, got one");
  KDTREE_CHECK(gate_up.dim() > 0, op, ": gate_up: expected the experts' weights, got a scalar");
  const int64_t num_rows = x.size(0), dim = x.size(1), num_experts = gate_up.size(0);
  const bool int4 =
      call.expect_weight("gate_up", gate_up, type, num_experts, 2 * width, dim, "[E, ceil(2I/16), D, 16]");
  KDTREE_CHECK(call.expect_weight("down", down, type, num_experts, dim, width, "[E, ceil(D/16), I, 16]") == int4, op,
               ": down: expected weights of the type of gate_up, got ", down.scalar_type());
  KDTREE_CHECK(shared_gate_up.has_value() == shared_down.has_value(), op,
               ": expected shared_gate_up and shared_down together or neither, got one");
  if (shared_gate_up) {
    expect_range(op, "shared_width", shared_width, is_share ? 0 : 1, kMaxSize);
    call.expect_packed("shared_gate_up", *shared_gate_up, type, 1, 2 * shared_width, dim, "[1, ceil(2S/16), D, 16]");
    call.expect_packed("shared_down", *shared_down, type, 1, dim, shared_width, "[1, ceil(D/16), S, 16]");
  }
  call.expect("expert_id", expert_id, at::kInt, {num_rows, -1}, "[T, top_k]");
  const int64_t top_k = expert_id.size(1);
  call.expect("weight", weight, at::kFloat, {num_rows, top_k}, "[T, top_k]");
  if (residual) call.expect("residual", *residual, type, {num_rows, dim}, "[T, D]");
  Tensor out = call.empty({num_rows, dim}, is_share ? at::kFloat : type);
  MoeExpertsArgs args{x.const_data_ptr(), gate_up.const_data_ptr(), down.const_data_ptr(), data_or_null(shared_gate_up),
                      data_or_null(shared_down), expert_id.const_data_ptr<int32_t>(), weight.const_data_ptr<float>(),
                      data_or_null(residual), out.mutable_data_ptr(), num_rows, dim, num_experts, top_k, width,
                      shared_width, dtype, call.num_threads(), call.rows_in_use(rows_used), nullptr, int4, whole_width,
                      whole_shared_width, int32_t(first_segment), int32_t(num_segments)};
  const Tensor workspace = call.workspace_of(args);
  const int status = call.run(args);
  if (call.refused(status, kOutOfRange)) expect_values<int32_t>(op, "expert_id", expert_id, 0, num_experts - 1);
  call.check(status);
  return out;
}

template <class Device>
void cache_append(const Tensor& cache, const Tensor& latent, const Tensor& k_rope, const Tensor& stream,
                  const Tensor& slot, const OptionalTensor& rows_used) {
  const char* op = "cache_append";
  const Device call(op, "cache", cache);
  const Dtype dtype = float_type(op, "cache", cache);
  const auto type = cache.scalar_type();
  call.expect("cache", cache, type, {-1, -1, -1}, "[S, P, C+R]");
  call.expect("latent", latent, type, {-1, -1}, "[T, C]");
  const int64_t num_rows = latent.size(0), latent_dim = latent.size(1), rope_dim = cache.size(2) - latent_dim;
  KDTREE_CHECK(rope_dim >= 0, op, ": latent: expected at most the ", cache.size(2), " values of a slot, got ",
               latent_dim);
  call.expect("k_rope", k_rope, type, {num_rows, rope_dim}, "[T, R] with C+R of the cache");
  call.expect("stream", stream, at::kInt, {num_rows}, "[T]");
  call.expect("slot", slot, at::kInt, {num_rows}, "[T]");
  const int status = call.run(CacheAppendArgs{cache.mutable_data_ptr(), latent.const_data_ptr(), k_rope.const_data_ptr(),
                                              stream.const_data_ptr<int32_t>(), slot.const_data_ptr<int32_t>(),
                                              num_rows, cache.size(0), cache.size(1), latent_dim, rope_dim, dtype,
                                              call.rows_in_use(rows_used)});
  if (call.refused(status, kOutOfRange)) {
    expect_values<int32_t>(op, "stream", stream, 0, cache.size(0) - 1);
    expect_values<int32_t>(op, "slot", slot, 0, cache.size(1) - 1);
  }
  call.check(status);
}

template <class Device>
Tensor latent_append(const Tensor& cache, const Tensor& q_kv, const OptionalTensor& q_norm, const Tensor& kv_norm,
                     const Tensor& cos_sin, const Tensor& position, const Tensor& stream, const Tensor& slot, double eps,
                     const OptionalTensor& rows_used, bool settled) {
  const char* op = "latent_append";
  const Device call(op, "cache", cache);
  const Dtype dtype = float_type(op, "cache", cache);
  const auto type = cache.scalar_type();
  call.expect("kv_norm", kv_norm, type, {-1}, "[C]");
  call.expect("cos_sin", cos_sin, at::kFloat, {-1, -1}, "[positions, R]");
  const int64_t latent_dim = kv_norm.size(0), rope_dim = cos_sin.size(1), num_positions = cos_sin.size(0);
  KDTREE_CHECK(rope_dim % 2 == 0, op, ": cos_sin: expected an even last dimension R, got ", rope_dim);
  call.expect("cache", cache, type, {-1, -1, latent_dim + rope_dim}, "[S, P, C+R]");
  if (q_norm) call.expect("q_norm", *q_norm, type, {-1}, "[Q]");
  const int64_t query_dim = q_norm ? q_norm->size(0) : 0;
  call.expect_rows("q_kv", q_kv, 2, "[T, Q+C+R]");
  expect_type(op, "q_kv", q_kv, type);
  const int64_t num_rows = q_kv.size(0);
  expect_shape(op, "q_kv", q_kv, {num_rows, query_dim + latent_dim + rope_dim}, "[T, Q+C+R]");
  call.expect("position", position, at::kInt, {num_rows}, "[T]");
  call.expect("stream", stream, at::kInt, {num_rows}, "[T]");
  call.expect("slot", slot, at::kInt, {num_rows}, "[T]");
  expect_eps(op, eps);
  Tensor q = call.empty({num_rows, query_dim}, type);
  const int status = call.run(LatentAppendArgs{
      q_kv.const_data_ptr(), data_or_null(q_norm), kv_norm.const_data_ptr(), cos_sin.const_data_ptr<float>(),
      position.const_data_ptr<int32_t>(), stream.const_data_ptr<int32_t>(), slot.const_data_ptr<int32_t>(),
      q.mutable_data_ptr(), cache.mutable_data_ptr(), num_rows, query_dim, latent_dim, rope_dim, num_positions,
      cache.size(0), cache.size(1), q_kv.stride(0), float(eps), dtype, call.num_threads(), call.rows_in_use(rows_used),
      settled});
  if (call.refused(status, kOutOfRange)) {
    expect_values<int32_t>(op, "position", position, 0, num_positions - 1);
    expect_values<int32_t>(op, "stream", stream, 0, cache.size(0) - 1);
    expect_values<int32_t>(op, "slot", slot, 0, cache.size(1) - 1);
  }
  call.check(status);
  return q;
}

template <class Device>
std::tuple<Tensor, Tensor> absorb_query(const Tensor& q, const Tensor& packed, int64_t num_heads, int64_t latent_dim,
                                        const Tensor& cos_sin, const Tensor& position, const OptionalTensor& rows_used,
                                        bool settled) {
  const char* op = "absorb_query";
  const Device call(op, "q", q);
  const Dtype dtype = float_type(op, "q", q);
  const auto type = q.scalar_type();
  call.expect_rows("q", q, 2, "[T, H*(K+R)]");
  expect_range(op, "num_heads", num_heads, 1, kMaxSize);
  expect_range(op, "latent_dim", latent_dim, 0, kMaxSize);
  call.expect("cos_sin", cos_sin, at::kFloat, {-1, -1}, "[positions, R]");
  const int64_t num_rows = q.size(0), rope_dim = cos_sin.size(1), num_positions = cos_sin.size(0);
  KDTREE_CHECK(rope_dim % 2 == 0, op, ": cos_sin: expected an even last dimension R, got ", rope_dim);
  KDTREE_CHECK(q.size(1) % num_heads == 0 && q.size(1) / num_heads >= rope_dim, op, ": q: expected ", num_heads,
               " heads of K+R = K+", rope_dim, " columns, got ", q.size(1), " columns");
  const int64_t nope_dim = q.size(1) / num_heads - rope_dim;
  call.expect_packed("packed", packed, type, num_heads, latent_dim, nope_dim, "[H, ceil(C/16), K, 16]");
  call.expect("position", position, at::kInt, {num_rows}, "[T]");
  Tensor q_latent = call.empty({num_rows, num_heads, latent_dim}, type);
  Tensor q_rope = call.empty({num_rows, num_heads, rope_dim}, type);
  const int status = call.run(AbsorbQueryArgs{
      q.const_data_ptr(), packed.const_data_ptr(), cos_sin.const_data_ptr<float>(), position.const_data_ptr<int32_t>(),
      q_latent.mutable_data_ptr(), q_rope.mutable_data_ptr(), num_rows, num_heads, latent_dim, nope_dim, rope_dim,
      num_positions, q.stride(0), dtype, call.num_threads(), call.rows_in_use(rows_used), settled});
  if (call.refused(status, kOutOfRange)) expect_values<int32_t>(op, "position", position, 0, num_positions - 1);
  call.check(status);
  return {q_latent, q_rope};
}

template <class Device>
void cache_compact(const Tensor& cache, const Tensor& prefix_len, const Tensor& accepted_path,
                   const Tensor& num_accepted) {
  const char* op = "cache_compact";
  const Device call(op, "cache", cache);
  const Dtype dtype = float_type(op, "cache", cache);
  call.expect("cache", cache, cache.scalar_type(), {-1, -1, -1, -1}, "[layers, S, P, C+R]");
  const int64_t num_streams = cache.size(1), num_slots = cache.size(2);
  call.expect("prefix_len", prefix_len, at::kInt, {num_streams}, "[S]");
  call.expect("accepted_path", accepted_path, at::kInt, {num_streams, -1}, "[S, L]");
  call.expect("num_accepted", num_accepted, at::kInt, {num_streams}, "[S]");
  const int64_t max_depth = accepted_path.size(1);
  const int status = call.run(CacheCompactArgs{cache.mutable_data_ptr(), prefix_len.const_data_ptr<int32_t>(),
                                               accepted_path.const_data_ptr<int32_t>(),
                                               num_accepted.const_data_ptr<int32_t>(), cache.size(0), num_streams,
                                               num_slots, cache.size(3), max_depth, dtype});
  if (call.refused(status, kOutOfRange)) {
    expect_values<int32_t>(op, "num_accepted", num_accepted, 0, max_depth);
    expect_values<int32_t>(op, "prefix_len", prefix_len, 0, num_slots);
    KDTREE_CHECK(false, op, ": expected accepted nodes at slots below ", num_slots,
                 ", got a prefix_len + node past the cache");
  }
  KDTREE_CHECK(!call.refused(status, kInvalidTree), op,
               ": accepted_path: expected node indices of at least 1 that ascend along the path, got others");
  call.check(status);
}

template <class Device>
Tensor verify_attn(const Tensor& q_latent, const Tensor& q_rope, const Tensor& cache, const Tensor& stream,
                   const Tensor& node, const Tensor& parent, const Tensor& depth, const Tensor& prefix_len,
                   double scale, const OptionalTensor& rows_used) {
  const char* op = "verify_attn";
  const Device call(op, "q_latent", q_latent);
  const Dtype dtype = float_type(op, "q_latent", q_latent);
  const auto type = q_latent.scalar_type();
  call.expect("q_latent", q_latent, type, {-1, -1, -1}, "[T, H, C]");
  const int64_t num_rows = q_latent.size(0), num_heads = q_latent.size(1), latent_dim = q_latent.size(2);
  call.expect("q_rope", q_rope, type, {num_rows, num_heads, -1}, "[T, H, R]");
  const int64_t rope_dim = q_rope.size(2);
  call.expect("cache", cache, type, {-1, -1, latent_dim + rope_dim}, "[S, P, C+R]");
  const int64_t num_streams = cache.size(0), num_slots = cache.size(1);
  call.expect("stream", stream, at::kInt, {num_rows}, "[T]");
  call.expect("node", node, at::kInt, {num_rows}, "[T]");
  call.expect("parent", parent, at::kInt, {num_streams, -1}, "[S, N]");
  const int64_t num_tree_slots = parent.size(1);
  call.expect("depth", depth, at::kInt, {num_streams, num_tree_slots}, "[S, N]");
  call.expect("prefix_len", prefix_len, at::kInt, {num_streams}, "[S]");
  expect_finite(op, "scale", scale);
  Tensor out = call.empty({num_rows, num_heads, latent_dim}, type);
  VerifyAttnArgs args{q_latent.const_data_ptr(), q_rope.const_data_ptr(), cache.const_data_ptr(),
                      stream.const_data_ptr<int32_t>(), node.const_data_ptr<int32_t>(),
                      parent.const_data_ptr<int32_t>(), depth.const_data_ptr<int32_t>(),
                      prefix_len.const_data_ptr<int32_t>(), out.mutable_data_ptr(), num_rows, num_heads, latent_dim,
                      rope_dim, num_streams, num_slots, num_tree_slots, float(scale), dtype, call.num_threads(),
                      call.rows_in_use(rows_used)};
  const Tensor workspace = call.workspace_of(args);
  const int status = call.run(args);
  if (call.refused(status, kOutOfRange)) {
    expect_values<int32_t>(op, "stream", stream, 0, num_streams - 1);
    expect_values<int32_t>(op, "node", node, 0, num_tree_slots - 1);
    expect_values<int32_t>(op, "prefix_len", prefix_len, 0, num_slots);
    KDTREE_CHECK(false, op, ": expected tree nodes at slots below ", num_slots,
                 ", got a prefix_len + node past the cache");
  }
  call.check(status);
  return out;
}

}  // namespace kdtree::bind
