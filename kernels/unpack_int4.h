// CPU: INT4 weights as pack_int4 leaves them, turned into the packed BF16 of linear and moe_experts while a call lasts.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "bf16.h"

namespace kdtree {

using UnpackedInt4 = std::unique_ptr<Bf16[]>;  // [G, ceil(N/16), K, 16]

// The groups that are wanted, all if is_wanted is empty; others are left as memory was.
UnpackedInt4 unpack_int4(const void* packed, int64_t num_groups, int64_t num_out, int64_t num_in,
                         const std::vector<bool>& is_wanted, int num_threads);

}  // namespace kdtree
