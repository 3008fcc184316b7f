// Sizes of an INT4 weight, read off its tensors and checked.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>

#include "../int4_layout.h"
#include "checks.h"

namespace kdtree::bind {

struct Int4Sizes {
  int64_t num_groups, num_out, num_in, group_size;
  const int32_t* ids = nullptr;
  int64_t num_ids = 0, ids_per_row = 0;

  Int4Sizes(const char* op, const at::Tensor& weight, const at::Tensor& scale, const std::optional<at::Tensor>& group_id)
      : num_groups(weight.size(0)), num_out(weight.size(1)), num_in(weight.size(2) * 8), group_size(0) {
    const int64_t num_scales = scale.size(2);
    KDTREE_CHECK(num_scales > 0 && num_in % num_scales == 0 && num_in / num_scales % 8 == 0, op,
                 ": scale: expected groups of a multiple of 8 of the ", num_in, " inputs, got ", num_scales, " groups");
    group_size = num_in / num_scales;
    if (!group_id) return;
    ids = group_id->const_data_ptr<int32_t>();
    num_ids = group_id->numel();
    ids_per_row = group_id->size(1);
  }
};

// What pack_int4 takes and makes. The type and shape of its arrays have been checked.
struct PackInt4Sizes : Int4Sizes {
  PackInt4Sizes(const char* op, const at::Tensor& weight, const at::Tensor& scale) : Int4Sizes(op, weight, scale, {}) {
    KDTREE_CHECK(group_size % kInt4Unit == 0, op, ": scale: expected groups of a multiple of ", kInt4Unit, " inputs, got ",
                 group_size, "; keep such weights as they are");
  }

  PackInt4Args args(const at::Tensor& weight, const at::Tensor& scale, const at::Tensor& packed, int num_threads) const {
    return {weight.const_data_ptr<int32_t>(), static_cast<const uint16_t*>(scale.const_data_ptr()),
            packed.mutable_data_ptr<uint8_t>(), num_groups, num_out, num_in, group_size, num_threads};
  }
};

}  // namespace kdtree::bind
