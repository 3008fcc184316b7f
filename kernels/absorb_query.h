// The two operations that absorb_query stands for.
#pragma once
#include "op_args.h"

namespace kdtree {

inline LinearArgs product_of(const AbsorbQueryArgs& a) {
  LinearArgs product{};
  product.x = a.q, product.packed = a.packed, product.out = a.q_latent;
  product.num_rows = a.num_rows, product.num_groups = a.num_heads;
  product.num_out = a.latent_dim, product.num_in = a.nope_dim;
  product.x_row_stride = a.q_stride, product.x_group_stride = a.nope_dim;
  product.dtype = product.out_dtype = a.dtype, product.num_threads = a.num_threads;
  product.num_rows_device = a.num_rows_device, product.weights_settled = a.weights_settled;
  return product;
}

inline RopeArgs rope_of(const AbsorbQueryArgs& a) {
  const int64_t nope_bytes = a.num_heads * a.nope_dim * (a.dtype == kF32 ? 4 : 2);
  return {static_cast<const char*>(a.q) + nope_bytes, a.cos_sin, a.position, a.q_rope, a.num_rows, a.num_heads, a.rope_dim,
          a.num_positions, a.q_stride, a.rope_dim, a.dtype, a.num_threads, a.num_rows_device};
}

}  // namespace kdtree
