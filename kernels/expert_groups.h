// Groups of experts in moe_route: what both devices ask of their sizes.
#pragma once
#include "op_args.h"

namespace kdtree {

// Whole groups of at least 2 experts, and top_k experts in those that take part.
inline bool groups_are_valid(const MoeRouteArgs& a) {
  if (a.num_groups == 0 || a.num_groups == 1) return true;
  if (a.num_groups < 0 || a.num_experts % a.num_groups != 0 || a.num_experts / a.num_groups < 2) return false;
  return a.topk_groups >= 1 && a.topk_groups <= a.num_groups &&
         a.top_k <= a.topk_groups * (a.num_experts / a.num_groups);
}

}  // namespace kdtree
