// Sizes of an INT4 weight, read off its tensors and checked.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>

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

}  // namespace kdtree::bind
