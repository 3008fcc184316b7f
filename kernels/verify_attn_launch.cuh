// Where verify_attn keeps the partial results of a launch.
#pragma once
#include "verify_attn_plan.cuh"

namespace kdtree {

inline int64_t align256(int64_t bytes) { return (bytes + 255) / 256 * 256; }

inline int64_t max_leaves(const VerifyAttnArgs& a) { return leaf_of(int(a.num_slots)) + 1; }

// Lays the workspace of `num_rows` rows out from `base`; the bytes it takes.
inline int64_t lay_out(AttnLaunch& launch, const VerifyAttnArgs& a, int64_t num_rows, char* base) {
  launch.a = a;
  launch.num_rows = num_rows;
  launch.num_queries = num_rows * a.num_heads;
  launch.max_leaves = max_leaves(a);
  launch.pitch = (a.latent_dim + 3) / 4 * 4;
  const int64_t num_leaves = launch.num_queries * launch.max_leaves;
  int64_t bytes = 256;
  launch.tickets = reinterpret_cast<uint64_t*>(base);
  launch.num_leaves = reinterpret_cast<int32_t*>(base + bytes);
  bytes += align256(num_rows * int64_t(sizeof(int32_t)));
  launch.stats = reinterpret_cast<float2*>(base + bytes);
  bytes += align256(num_leaves * int64_t(sizeof(float2)));
  launch.partials = reinterpret_cast<float*>(base + bytes);
  return bytes + align256(num_leaves * launch.pitch * int64_t(sizeof(float)));
}

}  // namespace kdtree
