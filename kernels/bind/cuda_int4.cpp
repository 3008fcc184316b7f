// CUDA bindings of dequantize_int4 and pack_int4: check, allocate, launch.
#include <torch/library.h>

#include <optional>

#include "cuda_call.h"
#include "int4_sizes.h"

#define KDTREE_LIBRARY_IMPL_(ns, key, m) TORCH_LIBRARY_IMPL(ns, key, m)
#define KDTREE_LIBRARY_IMPL(ns, key, m) KDTREE_LIBRARY_IMPL_(ns, key, m)

namespace kdtree::bind {
namespace {

constexpr int64_t kBlockOutputs = 16, kBlockInputs = 32;

at::Tensor dequantize_int4(const at::Tensor& weight, const at::Tensor& scale, bool bf16,
                           const std::optional<at::Tensor>& group_id, const std::optional<at::Tensor>& rows_used) {
  const char* op = "dequantize_int4";
  const CudaCall call(op, "weight", weight);
  call.expect("weight", weight, at::kInt, {-1, -1, -1}, "[G, N, K/8]");
  call.expect("scale", scale, scale.scalar_type(), {weight.size(0), weight.size(1), -1}, "[G, N, K/group]");
  if (group_id) call.expect("group_id", *group_id, at::kInt, {-1, -1}, "[T, top_k]");
  const Int4Sizes s(op, weight, scale, group_id);
  at::Tensor packed = call.empty({s.num_groups, (s.num_out + kBlockOutputs - 1) / kBlockOutputs,
                                  (s.num_in + kBlockInputs - 1) / kBlockInputs, kBlockOutputs * kBlockInputs},
                                 bf16 ? at::kBFloat16 : at::kFloat);
  call.check(dequantize_int4_cuda({weight.const_data_ptr<int32_t>(), scale.const_data_ptr(), packed.mutable_data_ptr(),
                                   s.ids, s.num_ids, s.num_groups, s.num_out, s.num_in, s.group_size,
                                   float_type(op, "scale", scale), bf16 ? kBF16 : kF32, 0, call.rows_in_use(rows_used),
                                   s.ids_per_row},
                                  call.stream()));
  return packed;
}

at::Tensor pack_int4(const at::Tensor& weight, const at::Tensor& scale) {
  const char* op = "pack_int4";
  const CudaCall call(op, "weight", weight);
  call.expect("weight", weight, at::kInt, {-1, -1, -1}, "[G, N, K/8]");
  call.expect("scale", scale, at::kBFloat16, {weight.size(0), weight.size(1), -1}, "[G, N, K/group]");
  const PackInt4Sizes s(op, weight, scale);
  at::Tensor packed = call.empty(packed_int4_sizes(s.num_groups, s.num_out, s.num_in), at::kByte);
  call.check(pack_int4_cuda(s.args(weight, scale, packed, 0), call.stream()));
  return packed;
}

}  // namespace

KDTREE_LIBRARY_IMPL(KDTREE_NS, CUDA, m) {
  m.impl("dequantize_int4", &dequantize_int4);
  m.impl("pack_int4", &pack_int4);
}

}  // namespace kdtree::bind
