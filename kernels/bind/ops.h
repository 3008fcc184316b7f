// All bindings, templates over CpuCall or CudaCall, and their registration: each operation of schema.cpp.
#pragma once
#include <torch/library.h>

#include "block_ops.h"
#include "int4_ops.h"
#include "model_ops.h"
#include "tree_ops.h"
#include "vocab_ops.h"

#define KDTREE_LIBRARY_IMPL_(ns, key, m) TORCH_LIBRARY_IMPL(ns, key, m)
#define KDTREE_LIBRARY_IMPL(ns, key, m) KDTREE_LIBRARY_IMPL_(ns, key, m)

namespace kdtree::bind {

template <class Device>
void add_bindings(torch::Library& m) {
  m.impl("embed", &embed<Device>);
  m.impl("rms_norm", &rms_norm<Device>);
  m.impl("pack_linear", &pack_linear<Device>);
  m.impl("dequantize_int4", &dequantize_int4<Device>);
  m.impl("pack_int4", &pack_int4<Device>);
  m.impl("linear", &linear<Device>);
  m.impl("linear_heads", &linear_heads<Device>);
  m.impl("rope", &rope<Device>);
  m.impl("swiglu", &swiglu<Device>);
  m.impl("residual_add", &residual_add<Device>);
  m.impl("add_partials", &add_partials<Device>);
  m.impl("argmax", &argmax<Device>);
  m.impl("sample", &sample<Device>);
  m.impl("sample_among", &sample_among<Device>);
  m.impl("moe_route", &moe_route<Device>);
  m.impl("moe_experts", &moe_experts<Device>);
  m.impl("cache_append", &cache_append<Device>);
  m.impl("latent_append", &latent_append<Device>);
  m.impl("absorb_query", &absorb_query<Device>);
  m.impl("cache_compact", &cache_compact<Device>);
  m.impl("verify_attn", &verify_attn<Device>);
  m.impl("context_append", &context_append<Device>);
  m.impl("block_attn", &block_attn<Device>);
  m.impl("draft_topk", &draft_topk<Device>);
  m.impl("draft_topk_share", &draft_topk_share<Device>);
  m.impl("draft_topk_merge", &draft_topk_merge<Device>);
  m.impl("tree_build", &tree_build<Device>);
  m.impl("tree_rows", &tree_rows<Device>);
  m.impl("tree_rows_padded", &tree_rows_padded<Device>);
  m.impl("tree_accept", &tree_accept<Device>);
  m.impl("step_commit", &step_commit<Device>);
  m.impl("accepted_features", &accepted_features<Device>);
}

}  // namespace kdtree::bind
