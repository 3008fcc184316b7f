// Bindings of dequantize_int4 and pack_int4: check, allocate, call the kernel.
#pragma once
#include "call.h"

namespace kdtree::bind {

// Inputs that share a scale, of num_in inputs and scale [G, N, K/group_size].
inline int64_t expect_int4_groups(const char* op, int64_t num_in, const Tensor& scale) {
  const int64_t num_scales = scale.size(2);
  expect_at_least(op, "inputs K", num_in, 1);
  KDTREE_CHECK(num_scales > 0 && num_in % num_scales == 0 && num_in / num_scales % 8 == 0, op,
               ": scale: expected groups of a multiple of 8 of the ", num_in, " inputs, got ", num_scales, " groups");
  return num_in / num_scales;
}

template <class Device>
Tensor dequantize_int4(const Tensor& weight, const Tensor& scale, bool bf16, const OptionalTensor& group_id,
                       const OptionalTensor& rows_used) {
  const char* op = "dequantize_int4";
  const Device call(op, "weight", weight);
  call.expect("weight", weight, at::kInt, {-1, -1, -1}, "[G, N, K/8]");
  const int64_t num_groups = weight.size(0), num_out = weight.size(1), num_in = weight.size(2) * 8;
  call.expect("scale", scale, scale.scalar_type(), {num_groups, num_out, -1}, "[G, N, K/group]");
  if (group_id) call.expect("group_id", *group_id, at::kInt, {-1, -1}, "[T, top_k]");
  const int64_t group_size = expect_int4_groups(op, num_in, scale);
  Tensor packed = call.empty(Device::packed_sizes(num_groups, num_out, num_in), bf16 ? at::kBFloat16 : at::kFloat);
  call.check(call.run(DequantizeInt4Args{
      weight.const_data_ptr<int32_t>(), scale.const_data_ptr(), packed.mutable_data_ptr(),
      group_id ? group_id->const_data_ptr<int32_t>() : nullptr, group_id ? group_id->numel() : 0, num_groups, num_out,
      num_in, group_size, float_type(op, "scale", scale), bf16 ? kBF16 : kF32, call.num_threads(),
      call.rows_in_use(rows_used), group_id ? group_id->size(1) : 0}));
  return packed;
}

template <class Device>
Tensor pack_int4(const Tensor& weight, const Tensor& scale) {
  const char* op = "pack_int4";
  const Device call(op, "weight", weight);
  call.expect("weight", weight, at::kInt, {-1, -1, -1}, "[G, N, K/8]");
  const int64_t num_groups = weight.size(0), num_out = weight.size(1), num_in = weight.size(2) * 8;
  call.expect("scale", scale, at::kBFloat16, {num_groups, num_out, -1}, "[G, N, K/group]");
  const int64_t group_size = expect_int4_groups(op, num_in, scale);
  KDTREE_CHECK(group_size % kInt4Unit == 0, op, ": scale: expected groups of a multiple of ", kInt4Unit,
               " inputs, got ", group_size, "; keep such weights as they are");
  Tensor packed = call.empty(packed_int4_sizes(num_groups, num_out, num_in), at::kByte);
  const auto* scales = static_cast<const uint16_t*>(scale.const_data_ptr());
  call.check(call.run(PackInt4Args{weight.const_data_ptr<int32_t>(), scales, packed.mutable_data_ptr<uint8_t>(),
                                   num_groups, num_out, num_in, group_size, call.num_threads()}));
  return packed;
}

}  // namespace kdtree::bind
