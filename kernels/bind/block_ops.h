// Bindings of the operations of block drafters. On a GPU values are not checked, see cuda_call.h: nothing is written
// outside the cache there, and a block whose stream or prefix_len cannot be becomes NaN.
#pragma once
#include <algorithm>

#include "../accepted_token.h"
#include "../block_sees.h"
#include "call.h"

namespace kdtree::bind {

// Keys and values [S, P, Y, K, d] of a drafter's contexts, the table of the angles of its positions, and eps of its norms.
template <class Device>
Dtype expect_context(const Device& call, const Tensor& keys, const Tensor& values, const Tensor& cos_sin, double eps) {
  const char* symbols = "[S, P, Y, K, d]";
  const Dtype dtype = float_type(call.op(), "keys", keys);
  call.expect("keys", keys, keys.scalar_type(), {-1, -1, -1, -1, -1}, symbols);
  const auto want = keys.sizes();
  call.expect("values", values, keys.scalar_type(), {want[0], want[1], want[2], want[3], want[4]}, symbols);
  KDTREE_CHECK(want[4] % 2 == 0 && want[4] <= kMaxHeadDim, call.op(), ": keys: expected an even last dimension d of at most ",
               kMaxHeadDim, ", got ", want[4]);
  call.expect("cos_sin", cos_sin, at::kFloat, {-1, want[4]}, "[Q, d]");
  expect_finite(call.op(), "eps", eps);
  KDTREE_CHECK(eps >= 0, call.op(), ": eps: expected at least 0, got ", eps);
  return dtype;
}

template <class Device>
void context_append(const Tensor& keys, const Tensor& values, const Tensor& kv, const Tensor& key_norm, double eps,
                    const Tensor& cos_sin, const Tensor& stream, const Tensor& position) {
  const char* op = "context_append";
  const Device call(op, "keys", keys);
  const Dtype dtype = expect_context(call, keys, values, cos_sin, eps);
  const int64_t num_streams = keys.size(0), num_slots = keys.size(1), num_layers = keys.size(2),
                num_heads = keys.size(3), dim = keys.size(4);
  call.expect("kv", kv, keys.scalar_type(), {-1, 2 * num_layers * num_heads * dim}, "[T, 2 Y K d]");
  const int64_t num_rows = kv.size(0);
  call.expect("key_norm", key_norm, keys.scalar_type(), {num_layers, dim}, "[Y, d]");
  call.expect("stream", stream, at::kInt, {num_rows}, "[T]");
  call.expect("position", position, at::kInt, {num_rows}, "[T]");
  const int status = call.run(ContextAppendArgs{
      kv.const_data_ptr(), key_norm.const_data_ptr(), cos_sin.const_data_ptr<float>(), stream.const_data_ptr<int32_t>(),
      position.const_data_ptr<int32_t>(), keys.mutable_data_ptr(), values.mutable_data_ptr(), num_rows, num_layers,
      num_heads, dim, num_streams, num_slots, cos_sin.size(0), float(eps), dtype, call.num_threads()});
  if (call.refused(status, kOutOfRange)) {
    expect_values<int32_t>(op, "position", position, -1, std::min(num_slots, cos_sin.size(0)) - 1);
    KDTREE_CHECK(false, op, ": stream: expected 0 … ", num_streams - 1, ", got another");
  }
  call.check(status);
}

template <class Device>
Tensor block_attn(const Tensor& qkv, const Tensor& query_norm, const Tensor& key_norm, double eps, const Tensor& cos_sin,
                  const Tensor& keys, const Tensor& values, int64_t layer, const Tensor& stream,
                  const Tensor& prefix_len, double scale, int64_t window, bool causal) {
  const char* op = "block_attn";
  const Device call(op, "qkv", qkv);
  const Dtype dtype = expect_context(call, keys, values, cos_sin, eps);
  const int64_t num_kv_heads = keys.size(3), dim = keys.size(4);
  expect_at_least(op, "head dimension d", dim, 2);
  expect_range(op, "layer", layer, 0, keys.size(2) - 1);
  call.expect("qkv", qkv, keys.scalar_type(), {-1, -1, -1}, "[A, b, (H + 2K) d]");
  const int64_t num_blocks = qkv.size(0), block_size = qkv.size(1), num_heads = qkv.size(2) / dim - 2 * num_kv_heads;
  expect_range(op, "block size b", block_size, 1, kMaxBlockSize);
  KDTREE_CHECK(num_kv_heads > 0 && num_heads > 0 && num_heads % num_kv_heads == 0 && qkv.size(2) % dim == 0, op,
               ": qkv: expected queries of a multiple of ", num_kv_heads, " heads of ", dim,
               ", then as many keys and values as the context has, got rows of ", qkv.size(2));
  call.expect("query_norm", query_norm, keys.scalar_type(), {dim}, "[d]");
  call.expect("key_norm", key_norm, keys.scalar_type(), {dim}, "[d]");
  call.expect("stream", stream, at::kInt, {num_blocks}, "[A]");
  call.expect("prefix_len", prefix_len, at::kInt, {num_blocks}, "[A]");
  expect_range(op, "window", window, 0, kMaxSize);
  expect_finite(op, "scale", scale);
  Tensor out = call.empty({num_blocks, block_size, num_heads * dim}, keys.scalar_type());
  const int status = call.run(BlockAttnArgs{
      qkv.const_data_ptr(), query_norm.const_data_ptr(), key_norm.const_data_ptr(), cos_sin.const_data_ptr<float>(),
      keys.const_data_ptr(), values.const_data_ptr(), stream.const_data_ptr<int32_t>(),
      prefix_len.const_data_ptr<int32_t>(), out.mutable_data_ptr(), num_blocks, block_size, num_heads, num_kv_heads, dim,
      keys.size(0), keys.size(1), keys.size(2), layer, cos_sin.size(0), window, float(eps), float(scale), dtype,
      call.num_threads(), causal});
  if (call.refused(status, kOutOfRange)) {
    expect_values<int32_t>(op, "stream", stream, 0, keys.size(0) - 1);
    expect_values<int32_t>(op, "prefix_len", prefix_len, 0, std::min(keys.size(1), cos_sin.size(0) - block_size));
  }
  call.check(status);
  return out;
}

// The hidden states of n layers, side by side, where a step has accepted tokens.
template <class Device>
std::tuple<Tensor, Tensor, Tensor> accepted_features(at::TensorList hidden, const Tensor& first_row,
                                                     const Tensor& prefix_len, const Tensor& accepted_path,
                                                     const Tensor& num_accepted, const Tensor& active) {
  const char* op = "accepted_features";
  const Device call(op, "accepted_path", accepted_path);
  call.expect("accepted_path", accepted_path, at::kInt, {-1, -1}, "[S, L]");
  const int64_t num_streams = accepted_path.size(0), num_tokens = num_streams * (accepted_path.size(1) + 1);
  for (const auto& [name, values] : {std::pair{"first_row", &first_row}, {"prefix_len", &prefix_len},
                                     {"num_accepted", &num_accepted}, {"active", &active}})
    call.expect(name, *values, at::kInt, {num_streams}, "[S]");
  const int64_t num_layers = int64_t(hidden.size());
  expect_range(op, "number of hidden", num_layers, 1, kMaxFeatureLayers);
  const auto type = hidden[0].scalar_type();
  const Dtype dtype = float_type(op, "hidden", hidden[0]);
  expect_dim(op, "hidden", hidden[0], 2, "[T, D]");
  const int64_t num_rows = hidden[0].size(0), dim = hidden[0].size(1);
  const void* of_layer[kMaxFeatureLayers] = {};
  for (int64_t layer = 0; layer < num_layers; ++layer) {
    call.expect("hidden", hidden[layer], type, {num_rows, dim}, "[T, D]");
    of_layer[layer] = hidden[layer].const_data_ptr();
  }
  Tensor features = call.empty({num_tokens, num_layers * dim}, type);
  Tensor stream = call.empty({num_tokens}, at::kInt), position = call.empty({num_tokens}, at::kInt);
  const int status = call.run(AcceptedFeaturesArgs{
      of_layer[0], of_layer[1], of_layer[2], of_layer[3], of_layer[4], of_layer[5], of_layer[6], of_layer[7],
      first_row.const_data_ptr<int32_t>(), prefix_len.const_data_ptr<int32_t>(),
      accepted_path.const_data_ptr<int32_t>(), num_accepted.const_data_ptr<int32_t>(),
      active.const_data_ptr<int32_t>(), features.mutable_data_ptr(), stream.mutable_data_ptr<int32_t>(),
      position.mutable_data_ptr<int32_t>(), num_layers, num_rows, num_streams, accepted_path.size(1), dim, dtype});
  KDTREE_CHECK(!call.refused(status, kOutOfRange), op, ": expected at most ", accepted_path.size(1),
               " accepted nodes, rows among the ", num_rows, " of hidden and positions from 0, got others");
  call.check(status);
  return {features, stream, position};
}

}  // namespace kdtree::bind
