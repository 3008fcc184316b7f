// What each operation may be called with: `check` before a kernel runs, on any device; `explain` after one has refused
// what its arrays hold, on a CPU; `check_sizes` where a caller asks how much memory to get. Here those of the model.
#pragma once
#include <algorithm>
#include <utility>

#include "../block_sees.h"
#include "../expert_groups.h"
#include "../expert_shares.h"
#include "../partials.h"
#include "tree_checks.h"

namespace kdtree::capi {

inline void check(const EmbedArgs& a, Checks& c) {
  c.dtype("dtype", a.dtype);
  c.sizes({{"num_rows", a.num_rows}, {"vocab_size", a.vocab_size}, {"dim", a.dim}});
  c.floats("weight", a.weight, a.dtype, {a.vocab_size, a.dim}, "[V, D]");
  c.array("token", a.token, {a.num_rows}, "[T]");
  c.floats("out", a.out, a.dtype, {a.num_rows, a.dim}, "[T, D]");
  c.num_threads(a.num_threads);
  c.num_rows_device(a.num_rows_device);
}

inline void explain(const EmbedArgs& a, Checks& c) { c.values("token", a.token, a.num_rows, 0, a.vocab_size - 1); }

inline void check(const RmsNormArgs& a, Checks& c) {
  c.dtype("dtype", a.dtype);
  c.sizes({{"num_rows", a.num_rows}, {"dim", a.dim}});
  c.stride("x_stride", a.x_stride, a.num_rows, a.dim);
  c.floats("x", a.x, a.dtype, {a.num_rows, a.dim}, "[T, D]");
  c.floats("weight", a.weight, a.dtype, {a.dim}, "[D]");
  c.floats("out", a.out, a.dtype, {a.num_rows, a.dim}, "[T, D]");
  c.num_threads(a.num_threads);
  c.num_rows_device(a.num_rows_device);
}

inline void check_sizes(const PackLinearArgs& a, Checks& c) {
  c.dtype("dtype", a.dtype);
  c.sizes({{"num_groups", a.num_groups}, {"num_out", a.num_out}, {"num_in", a.num_in}});
}

inline void check(const PackLinearArgs& a, Checks& c) {
  check_sizes(a, c);
  c.floats("weight", a.weight, a.dtype, {a.num_groups, a.num_out, a.num_in}, "[G, N, K]");
  c.packed("packed", a.packed, a.dtype, a.num_groups, a.num_out, a.num_in);
  c.num_threads(a.num_threads);
}

inline void check(const DequantizeInt4Args& a, Checks& c) {
  c.dtype("dtype", a.dtype);
  c.dtype("out_dtype", a.out_dtype);
  c.sizes({{"num_groups", a.num_groups}, {"num_out", a.num_out}, {"num_in", a.num_in}, {"num_ids", a.num_ids},
           {"ids_per_row", a.ids_per_row}});
  c.range("group_size", a.group_size, 1, kMaxSize);
  c.array("weight", a.weight, {a.num_groups, a.num_out, (a.num_in + 7) / 8}, "[G, N, K/8]");
  const int64_t num_scales = a.num_in / (a.group_size > 0 ? a.group_size : 1);
  c.floats("scale", a.scale, a.dtype, {a.num_groups, a.num_out, num_scales}, "[G, N, K/group_size]");
  c.packed("packed", a.packed, a.out_dtype, a.num_groups, a.num_out, a.num_in);
  if (a.group_id != nullptr) c.array("group_id", a.group_id, {a.num_ids}, "[num_ids]");
  c.expect(num_scales * a.group_size == a.num_in && a.group_size % 8 == 0,
           "group_size: expected a multiple of 8 that divides num_in, got another");
  c.num_threads(a.num_threads);
  c.num_rows_device(a.num_rows_device);
}

inline void check(const PackInt4Args& a, Checks& c) {
  c.sizes({{"num_groups", a.num_groups}, {"num_out", a.num_out}, {"num_in", a.num_in}});
  c.range("group_size", a.group_size, 1, kMaxSize);
  c.array("weight", a.weight, {a.num_groups, a.num_out, (a.num_in + 7) / 8}, "[G, N, K/8]");
  const int64_t num_scales = a.num_in / (a.group_size > 0 ? a.group_size : 1);
  c.array("scale", a.scale, {a.num_groups, a.num_out, num_scales}, "[G, N, K/group_size]");
  c.packed_int4("packed", a.packed, a.num_groups, a.num_out, a.num_in);
  c.expect(num_scales * a.group_size == a.num_in && a.group_size % kInt4Unit == 0,
           "group_size: expected a multiple of 32 that divides num_in, got another");
  c.num_threads(a.num_threads);
}

inline void check(const LinearArgs& a, Checks& c) {
  c.dtype("dtype", a.dtype);
  c.dtype("out_dtype", a.out_dtype);
  c.expect(a.out_dtype == a.dtype || a.out_dtype == kF32,
           "out_dtype: expected that of the input or F32, got BF16 of F32");
  c.expect(a.residual == nullptr || a.out_dtype == a.dtype,
           "residual: expected NULL where out_dtype is not dtype, got one");
  c.expect(SegmentShare{a.whole_in, a.first_segment, a.num_segments}.fits(a.num_in),
           "whole_in, first_segment, num_segments: expected segments of num_in inputs, got others");
  c.expect(a.num_segments == 0 || (a.residual == nullptr && a.out_dtype == kF32),
           "num_segments: expected out_dtype F32 and no residual with a share of the segments, got others");
  c.sizes({{"num_rows", a.num_rows}, {"num_groups", a.num_groups}, {"num_out", a.num_out}, {"num_in", a.num_in}});
  c.stride("x_row_stride", a.x_row_stride, a.num_rows, a.num_in);
  c.stride("x_group_stride", a.x_group_stride, a.num_groups, a.num_in);
  c.floats("x", a.x, a.dtype, {a.num_rows, a.num_groups, a.num_in}, "[T, G, K]");
  c.weight("packed", a.packed, a.int4, a.dtype, a.num_groups, a.num_out, a.num_in);
  if (a.residual) c.floats("residual", a.residual, a.dtype, {a.num_rows, a.num_groups, a.num_out}, "[T, G, N]");
  c.floats("out", a.out, a.out_dtype, {a.num_rows, a.num_groups, a.num_out}, "[T, G, N]");
  c.num_threads(a.num_threads);
  c.num_rows_device(a.num_rows_device);
}

inline void check(const RopeArgs& a, Checks& c) {
  c.dtype("dtype", a.dtype);
  c.sizes({{"num_rows", a.num_rows}, {"num_heads", a.num_heads}, {"dim", a.dim}, {"num_positions", a.num_positions}});
  c.expect(a.dim % 2 == 0, "dim: expected an even number, got an odd one");
  c.stride("x_row_stride", a.x_row_stride, a.num_rows, a.dim);
  c.stride("x_head_stride", a.x_head_stride, a.num_heads, a.dim);
  c.floats("x", a.x, a.dtype, {a.num_rows, a.num_heads, a.dim}, "[T, H, R]");
  c.array("cos_sin", a.cos_sin, {a.num_positions, a.dim}, "[P, R]");
  c.array("position", a.position, {a.num_rows}, "[T]");
  c.floats("out", a.out, a.dtype, {a.num_rows, a.num_heads, a.dim}, "[T, H, R]");
  c.num_threads(a.num_threads);
  c.num_rows_device(a.num_rows_device);
}

inline void explain(const RopeArgs& a, Checks& c) {
  c.values("position", a.position, a.num_rows, 0, a.num_positions - 1);
}

inline void check(const SwigluArgs& a, Checks& c) {
  c.dtype("dtype", a.dtype);
  c.sizes({{"num_rows", a.num_rows}, {"dim", a.dim}});
  c.floats("gate_up", a.gate_up, a.dtype, {a.num_rows, 2, a.dim}, "[T, 2I]");
  c.floats("out", a.out, a.dtype, {a.num_rows, a.dim}, "[T, I]");
  c.num_threads(a.num_threads);
  c.num_rows_device(a.num_rows_device);
}

inline void check(const ResidualAddArgs& a, Checks& c) {
  c.dtype("dtype", a.dtype);
  c.sizes({{"num_rows", a.num_rows}, {"dim", a.dim}});
  c.floats("x", a.x, a.dtype, {a.num_rows, a.dim}, "[T, D]");
  c.floats("y", a.y, a.dtype, {a.num_rows, a.dim}, "[T, D]");
  c.floats("out", a.out, a.dtype, {a.num_rows, a.dim}, "[T, D]");
  c.num_threads(a.num_threads);
  c.num_rows_device(a.num_rows_device);
}

inline void check(const AddPartialsArgs& a, Checks& c) {
  c.dtype("dtype", a.dtype);
  c.expect(is_num_partials(a.num_partials), "num_partials: expected 1, 2, 4 or 8, got another number");
  c.sizes({{"num_partials", a.num_partials}, {"num_rows", a.num_rows}, {"dim", a.dim}});
  c.array("partials", a.partials, {a.num_partials, a.num_rows, a.dim}, "[P, T, N]");
  if (a.residual) c.floats("residual", a.residual, a.dtype, {a.num_rows, a.dim}, "[T, N]");
  c.floats("out", a.out, a.dtype, {a.num_rows, a.dim}, "[T, N]");
  c.num_threads(a.num_threads);
  c.num_rows_device(a.num_rows_device);
}

inline void check(const MoeRouteArgs& a, Checks& c) {
  c.sizes({{"num_rows", a.num_rows}});
  c.range("num_experts", a.num_experts, 1, kMaxIndex);
  c.range("top_k", a.top_k, 1, a.num_experts);
  c.range("scoring", a.scoring, kSoftmax, kSigmoid);
  c.array("logits", a.logits, {a.num_rows, a.num_experts}, "[T, E]");
  c.optional("bias", a.bias, sizeof(float), "[E]");
  c.array("expert_id", a.expert_id, {a.num_rows, a.top_k}, "[T, top_k]");
  c.array("weight", a.weight, {a.num_rows, a.top_k}, "[T, top_k]");
  c.expect(groups_are_valid(a), "num_groups, topk_groups: expected whole groups of at least 2 experts, and top_k in "
                                "those that are chosen, got others");
  c.num_rows_device(a.num_rows_device);
}

inline void check_sizes(const MoeExpertsArgs& a, Checks& c) {
  c.dtype("dtype", a.dtype);
  c.sizes({{"num_rows", a.num_rows}, {"dim", a.dim}, {"shared_width", a.shared_width}});
  c.range("num_experts", a.num_experts, 0, kMaxIndex);
  c.range("top_k", a.top_k, 0, kMaxIndex);
  c.range("width", a.width, a.num_segments == 0, kMaxSize / 2);
  c.expect(shares_fit(a), "whole_width, whole_shared_width, first_segment, num_segments: expected segments of width and "
                          "shared_width, and no residual, got others");
}

inline void check(const MoeExpertsArgs& a, Checks& c) {
  check_sizes(a, c);
  c.expect((a.shared_gate_up == nullptr) == (a.shared_down == nullptr),
           "expected shared_gate_up and shared_down together or neither, got one");
  c.floats("x", a.x, a.dtype, {a.num_rows, a.dim}, "[T, D]");
  c.weight("gate_up", a.gate_up, a.int4, a.dtype, a.num_experts, 2 * a.width, a.dim);
  c.weight("down", a.down, a.int4, a.dtype, a.num_experts, a.dim, a.width);
  if (a.shared_gate_up) {
    c.range("shared_width", a.shared_width, a.num_segments == 0, kMaxSize / 2);
    c.packed("shared_gate_up", a.shared_gate_up, a.dtype, 1, 2 * a.shared_width, a.dim);
    c.packed("shared_down", a.shared_down, a.dtype, 1, a.dim, a.shared_width);
  }
  c.array("expert_id", a.expert_id, {a.num_rows, a.top_k}, "[T, top_k]");
  c.array("weight", a.weight, {a.num_rows, a.top_k}, "[T, top_k]");
  if (a.residual) c.floats("residual", a.residual, a.dtype, {a.num_rows, a.dim}, "[T, D]");
  c.floats("out", a.out, a.num_segments > 0 ? kF32 : a.dtype, {a.num_rows, a.dim}, "[T, D]");
  c.num_threads(a.num_threads);
  c.num_rows_device(a.num_rows_device);
}

inline void explain(const MoeExpertsArgs& a, Checks& c) {
  c.values("expert_id", a.expert_id, a.num_rows * a.top_k, 0, a.num_experts - 1);
}

inline void check(const CacheAppendArgs& a, Checks& c) {
  c.dtype("dtype", a.dtype);
  c.sizes({{"num_rows", a.num_rows}, {"num_streams", a.num_streams}, {"num_slots", a.num_slots},
           {"latent_dim", a.latent_dim}, {"rope_dim", a.rope_dim}});
  c.floats("cache", a.cache, a.dtype, {a.num_streams, a.num_slots, a.latent_dim + a.rope_dim}, "[S, P, C+R]");
  c.floats("latent", a.latent, a.dtype, {a.num_rows, a.latent_dim}, "[T, C]");
  c.floats("k_rope", a.k_rope, a.dtype, {a.num_rows, a.rope_dim}, "[T, R]");
  c.array("stream", a.stream, {a.num_rows}, "[T]");
  c.array("slot", a.slot, {a.num_rows}, "[T]");
  c.num_rows_device(a.num_rows_device);
}

inline void explain(const CacheAppendArgs& a, Checks& c) {
  c.values("stream", a.stream, a.num_rows, 0, a.num_streams - 1);
  c.values("slot", a.slot, a.num_rows, 0, a.num_slots - 1);
}

inline void check(const LatentAppendArgs& a, Checks& c) {
  c.dtype("dtype", a.dtype);
  c.sizes({{"num_rows", a.num_rows}, {"query_dim", a.query_dim}, {"latent_dim", a.latent_dim},
           {"rope_dim", a.rope_dim}, {"num_positions", a.num_positions}, {"num_streams", a.num_streams},
           {"num_slots", a.num_slots}});
  c.expect(a.rope_dim % 2 == 0, "rope_dim: expected an even number, got an odd one");
  const int64_t width = a.query_dim + a.latent_dim + a.rope_dim;
  c.stride("q_kv_stride", a.q_kv_stride, a.num_rows, width);
  c.floats("q_kv", a.q_kv, a.dtype, {a.num_rows, width}, "[T, Q+C+R]");
  c.floats("q_norm", a.q_norm, a.dtype, {a.query_dim}, "[Q]");
  c.floats("kv_norm", a.kv_norm, a.dtype, {a.latent_dim}, "[C]");
  c.array("cos_sin", a.cos_sin, {a.num_positions, a.rope_dim}, "[num_positions, R]");
  c.array("position", a.position, {a.num_rows}, "[T]");
  c.array("stream", a.stream, {a.num_rows}, "[T]");
  c.array("slot", a.slot, {a.num_rows}, "[T]");
  c.floats("q", a.q, a.dtype, {a.num_rows, a.query_dim}, "[T, Q]");
  c.floats("cache", a.cache, a.dtype, {a.num_streams, a.num_slots, a.latent_dim + a.rope_dim}, "[S, P, C+R]");
  c.num_threads(a.num_threads);
  c.num_rows_device(a.num_rows_device);
}

inline void explain(const LatentAppendArgs& a, Checks& c) {
  c.values("position", a.position, a.num_rows, 0, a.num_positions - 1);
  c.values("stream", a.stream, a.num_rows, 0, a.num_streams - 1);
  c.values("slot", a.slot, a.num_rows, 0, a.num_slots - 1);
}

inline void check(const AbsorbQueryArgs& a, Checks& c) {
  c.dtype("dtype", a.dtype);
  c.sizes({{"num_rows", a.num_rows}, {"num_heads", a.num_heads}, {"latent_dim", a.latent_dim}, {"nope_dim", a.nope_dim},
           {"rope_dim", a.rope_dim}, {"num_positions", a.num_positions}});
  c.expect(a.rope_dim % 2 == 0, "rope_dim: expected an even number, got an odd one");
  if (c.status() == KDTREE_OK) c.range("q_stride", a.q_stride, 0, kMaxSize);
  const int64_t head = c.status() == KDTREE_OK ? a.nope_dim + a.rope_dim : 0;
  c.floats("q", a.q, a.dtype, {a.num_rows, a.num_heads, head}, "[T, H*(K+R)]");
  if (c.status() == KDTREE_OK) c.stride("q_stride", a.q_stride, a.num_rows, a.num_heads * head);
  c.packed("packed", a.packed, a.dtype, a.num_heads, a.latent_dim, a.nope_dim);
  c.array("cos_sin", a.cos_sin, {a.num_positions, a.rope_dim}, "[num_positions, R]");
  c.array("position", a.position, {a.num_rows}, "[T]");
  c.floats("q_latent", a.q_latent, a.dtype, {a.num_rows, a.num_heads, a.latent_dim}, "[T, H, C]");
  c.floats("q_rope", a.q_rope, a.dtype, {a.num_rows, a.num_heads, a.rope_dim}, "[T, H, R]");
  c.num_threads(a.num_threads);
  c.num_rows_device(a.num_rows_device);
}

inline void explain(const AbsorbQueryArgs& a, Checks& c) {
  c.values("position", a.position, a.num_rows, 0, a.num_positions - 1);
}

inline void check(const CacheCompactArgs& a, Checks& c) {
  c.dtype("dtype", a.dtype);
  c.sizes({{"num_layers", a.num_layers}, {"num_streams", a.num_streams}, {"num_slots", a.num_slots},
           {"width", a.width}, {"max_depth", a.max_depth}});
  c.floats("cache", a.cache, a.dtype, {a.num_layers, a.num_streams, a.num_slots, a.width}, "[num_layers, S, P, W]");
  c.array("prefix_len", a.prefix_len, {a.num_streams}, "[S]");
  c.array("accepted_path", a.accepted_path, {a.num_streams, a.max_depth}, "[S, L]");
  c.array("num_accepted", a.num_accepted, {a.num_streams}, "[S]");
}

inline void explain(const CacheCompactArgs& a, Checks& c) {
  c.values("num_accepted", a.num_accepted, a.num_streams, 0, a.max_depth);
  c.values("prefix_len", a.prefix_len, a.num_streams, 0, a.num_slots);
  c.out_of_range("expected nodes at slots below num_slots, got a prefix_len + node past the cache");
}

inline void check_sizes(const VerifyAttnArgs& a, Checks& c) {
  c.dtype("dtype", a.dtype);
  c.sizes({{"num_rows", a.num_rows}, {"num_heads", a.num_heads}, {"latent_dim", a.latent_dim},
           {"rope_dim", a.rope_dim}, {"num_slots", a.num_slots}});
  c.range("num_streams", a.num_streams, 0, kMaxIndex);
  c.range("num_tree_slots", a.num_tree_slots, 0, kMaxIndex);
}

inline void check(const VerifyAttnArgs& a, Checks& c) {
  check_sizes(a, c);
  c.floats("q_latent", a.q_latent, a.dtype, {a.num_rows, a.num_heads, a.latent_dim}, "[T, H, C]");
  c.floats("q_rope", a.q_rope, a.dtype, {a.num_rows, a.num_heads, a.rope_dim}, "[T, H, R]");
  c.floats("cache", a.cache, a.dtype, {a.num_streams, a.num_slots, a.latent_dim + a.rope_dim}, "[S, P, C+R]");
  c.array("stream", a.stream, {a.num_rows}, "[T]");
  c.array("node", a.node, {a.num_rows}, "[T]");
  c.array("parent", a.parent, {a.num_streams, a.num_tree_slots}, "[S, N]");
  c.array("depth", a.depth, {a.num_streams, a.num_tree_slots}, "[S, N]");
  c.array("prefix_len", a.prefix_len, {a.num_streams}, "[S]");
  c.floats("out", a.out, a.dtype, {a.num_rows, a.num_heads, a.latent_dim}, "[T, H, C]");
  c.num_threads(a.num_threads);
  c.num_rows_device(a.num_rows_device);
}

inline void explain(const VerifyAttnArgs& a, Checks& c) {
  c.values("stream", a.stream, a.num_rows, 0, a.num_streams - 1);
  c.values("node", a.node, a.num_rows, 0, a.num_tree_slots - 1);
  c.values("prefix_len", a.prefix_len, a.num_streams, 0, a.num_slots);
  c.out_of_range("expected nodes at slots below num_slots, got a prefix_len + node past the cache");
}

inline void check(const ContextAppendArgs& a, Checks& c) {
  c.dtype("dtype", a.dtype);
  c.sizes({{"num_rows", a.num_rows}, {"num_layers", a.num_layers}, {"num_heads", a.num_heads}, {"dim", a.dim},
           {"num_streams", a.num_streams}, {"num_slots", a.num_slots}, {"num_positions", a.num_positions}});
  c.range("dim", a.dim, 0, kMaxHeadDim);
  c.expect(a.dim % 2 == 0, "dim: expected an even number, got an odd one");
  c.floats("kv", a.kv, a.dtype, {a.num_rows, 2, a.num_layers, a.num_heads, a.dim}, "[T, 2, Y, K, d]");
  c.floats("key_norm", a.key_norm, a.dtype, {a.num_layers, a.dim}, "[Y, d]");
  c.array("cos_sin", a.cos_sin, {a.num_positions, a.dim}, "[Q, d]");
  c.array("stream", a.stream, {a.num_rows}, "[T]");
  c.array("position", a.position, {a.num_rows}, "[T]");
  for (const auto& [name, cache] : {std::pair{"keys", a.keys}, std::pair{"values", a.values}})
    c.floats(name, cache, a.dtype, {a.num_streams, a.num_slots, a.num_layers, a.num_heads, a.dim}, "[S, P, Y, K, d]");
  c.num_threads(a.num_threads);
}

inline void explain(const ContextAppendArgs& a, Checks& c) {
  c.values("position", a.position, a.num_rows, -1, std::min(a.num_slots, a.num_positions) - 1);
  c.out_of_range("expected streams below num_streams, got others");
}

inline void check(const BlockAttnArgs& a, Checks& c) {
  c.dtype("dtype", a.dtype);
  c.sizes({{"num_blocks", a.num_blocks}, {"num_streams", a.num_streams}, {"num_slots", a.num_slots},
           {"num_layers", a.num_layers}, {"num_positions", a.num_positions}, {"num_heads", a.num_heads}});
  c.range("block_size", a.block_size, 1, kMaxBlockSize);
  c.range("num_kv_heads", a.num_kv_heads, 1, kMaxIndex);
  c.range("dim", a.dim, 2, kMaxHeadDim);
  c.range("window", a.window, 0, kMaxSize);
  c.expect(a.dim % 2 == 0, "dim: expected an even number, got an odd one");
  c.expect(a.num_kv_heads > 0 && a.num_heads % a.num_kv_heads == 0,
           "num_heads: expected a multiple of num_kv_heads, got another number");
  const int64_t rows = a.num_heads + 2 * a.num_kv_heads;
  c.floats("qkv", a.qkv, a.dtype, {a.num_blocks, a.block_size, rows, a.dim}, "[A, b, H + 2K, d]");
  c.floats("query_norm", a.query_norm, a.dtype, {a.dim}, "[d]");
  c.floats("key_norm", a.key_norm, a.dtype, {a.dim}, "[d]");
  c.array("cos_sin", a.cos_sin, {a.num_positions, a.dim}, "[Q, d]");
  for (const auto& [name, cache] : {std::pair{"keys", a.keys}, std::pair{"values", a.values}})
    c.floats(name, cache, a.dtype, {a.num_streams, a.num_slots, a.num_layers, a.num_kv_heads, a.dim},
             "[S, P, Y, K, d]");
  c.array("stream", a.stream, {a.num_blocks}, "[A]");
  c.array("prefix_len", a.prefix_len, {a.num_blocks}, "[A]");
  c.floats("out", a.out, a.dtype, {a.num_blocks, a.block_size, a.num_heads, a.dim}, "[A, b, H, d]");
  c.range("layer", a.layer, 0, a.num_layers - 1);
  c.num_threads(a.num_threads);
}

inline void explain(const BlockAttnArgs& a, Checks& c) {
  c.values("stream", a.stream, a.num_blocks, 0, a.num_streams - 1);
  c.values("prefix_len", a.prefix_len, a.num_blocks, 0, std::min(a.num_slots, a.num_positions - a.block_size));
}

template <class Args>
void explain(const Args&, Checks&) {}  // the kernel's status says it all

}  // namespace kdtree::capi
