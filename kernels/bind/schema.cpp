// The one TORCH_LIBRARY block: the table of contents of the native operations. The namespace carries a hash of the
// sources (KDTREE_NS), so that two builds can never register the same names in one process.
#include <torch/library.h>

#define KDTREE_LIBRARY_(ns, m) TORCH_LIBRARY(ns, m)
#define KDTREE_LIBRARY(ns, m) KDTREE_LIBRARY_(ns, m)

KDTREE_LIBRARY(KDTREE_NS, m) {
  m.def("embed(Tensor weight, Tensor token, Tensor? num_rows=None) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps, Tensor? num_rows=None, bool settled=False) -> Tensor");
  m.def("pack_linear(Tensor weight) -> Tensor");
  m.def("dequantize_int4(Tensor weight, Tensor scale, bool bf16, Tensor? group_id=None, Tensor? num_rows=None) "
        "-> Tensor");
  m.def("pack_int4(Tensor weight, Tensor scale) -> Tensor");
  m.def("linear(Tensor x, Tensor packed, int num_out, Tensor? residual, bool out_f32, Tensor? num_rows=None, "
        "bool settled=False, int whole_in=0, int first_segment=0, int num_segments=0) -> Tensor");
  m.def("linear_heads(Tensor x, Tensor packed, int num_out, Tensor? num_rows=None, bool settled=False) -> Tensor");
  m.def("rope(Tensor x, Tensor cos_sin, Tensor position, Tensor? num_rows=None) -> Tensor");
  m.def("swiglu(Tensor gate_up, Tensor? num_rows=None) -> Tensor");
  m.def("residual_add(Tensor x, Tensor y, Tensor? num_rows=None) -> Tensor");
  m.def("add_partials(Tensor partials, Tensor? residual, bool bf16, Tensor? num_rows=None) -> Tensor");
  m.def("argmax(Tensor logits, Tensor? num_rows=None) -> Tensor");
  m.def("sample(Tensor logits, Tensor stream, Tensor position, Tensor temperature, Tensor top_k, Tensor top_p, "
        "Tensor seed, Tensor? num_rows=None) -> Tensor");
  m.def("sample_among(Tensor words, Tensor largest, Tensor stream, Tensor position, Tensor temperature, Tensor top_k, "
        "Tensor top_p, Tensor seed, int vocab_size, Tensor? num_rows=None) -> Tensor");
  m.def("moe_route(Tensor logits, Tensor? bias, int top_k, int scoring, bool renormalize, float scaling_factor, "
        "Tensor? num_rows=None, int num_groups=1, int topk_groups=1) -> (Tensor expert_id, Tensor weight)");
  m.def("moe_experts(Tensor x, Tensor gate_up, Tensor down, Tensor? shared_gate_up, Tensor? shared_down, "
        "Tensor expert_id, Tensor weight, int width, int shared_width, Tensor? residual, Tensor? num_rows=None, "
        "int whole_width=0, int whole_shared_width=0, int first_segment=0, int num_segments=0) -> Tensor");
  m.def("cache_append(Tensor(a!) cache, Tensor latent, Tensor k_rope, Tensor stream, Tensor slot, "
        "Tensor? num_rows=None) -> ()");
  m.def("latent_append(Tensor(a!) cache, Tensor q_kv, Tensor? q_norm, Tensor kv_norm, Tensor cos_sin, Tensor position, "
        "Tensor stream, Tensor slot, float eps, Tensor? num_rows=None, bool settled=False) -> Tensor");
  m.def("absorb_query(Tensor q, Tensor packed, int num_heads, int latent_dim, Tensor cos_sin, Tensor position, "
        "Tensor? num_rows=None, bool settled=False) -> (Tensor q_latent, Tensor q_rope)");
  m.def("cache_compact(Tensor(a!) cache, Tensor prefix_len, Tensor accepted_path, Tensor num_accepted) -> ()");
  m.def("verify_attn(Tensor q_latent, Tensor q_rope, Tensor cache, Tensor stream, Tensor node, Tensor parent, "
        "Tensor depth, Tensor prefix_len, float scale, Tensor? num_rows=None) -> Tensor");
  m.def("context_append(Tensor(a!) keys, Tensor(b!) values, Tensor kv, Tensor key_norm, float eps, Tensor cos_sin, "
        "Tensor stream, Tensor position) -> ()");
  m.def("block_attn(Tensor qkv, Tensor query_norm, Tensor key_norm, float eps, Tensor cos_sin, Tensor keys, "
        "Tensor values, int layer, Tensor stream, Tensor prefix_len, float scale, int window, bool causal) -> Tensor");
  m.def("draft_topk(Tensor logits, int num_candidates) -> (Tensor log_probs, Tensor token_ids)");
  m.def("draft_topk_share(Tensor logits, int num_candidates, int whole_vocab, int first_segment, int num_segments) "
        "-> Tensor");
  m.def("draft_topk_merge(Tensor words, int num_candidates) -> (Tensor log_probs, Tensor token_ids)");
  m.def("tree_build(Tensor log_probs, Tensor token_ids, Tensor bonus, Tensor budget, int max_budget) -> "
        "(Tensor token, Tensor parent, Tensor depth, Tensor log_prob, Tensor ancestor_bits, Tensor num_nodes)");
  m.def("tree_rows(Tensor token, Tensor depth, Tensor num_nodes, Tensor prefix_len) -> "
        "(Tensor row_stream, Tensor row_node, Tensor row_position, Tensor row_slot, Tensor row_token)");
  m.def("tree_rows_padded(Tensor token, Tensor depth, Tensor num_nodes, Tensor prefix_len) -> "
        "(Tensor row_stream, Tensor row_node, Tensor row_position, Tensor row_slot, Tensor row_token, "
        "Tensor row_begin, Tensor num_rows)");
  m.def("tree_accept(Tensor token, Tensor parent, Tensor num_nodes, Tensor target_token, int max_depth, "
        "Tensor? row_begin=None) -> "
        "(Tensor accepted_path, Tensor num_accepted, Tensor next_token)");
  m.def("step_commit(Tensor accepted_path, Tensor num_accepted, Tensor num_nodes, Tensor target_token, "
        "Tensor row_begin, Tensor is_stop, Tensor(a!) prefix_len, Tensor(b!) bonus, Tensor(c!) remaining, "
        "Tensor(d!) active, Tensor(e!) text, Tensor(f!) ring, Tensor(g!) step) -> ()");
  m.def("accepted_features(Tensor[] hidden, Tensor first_row, Tensor prefix_len, Tensor accepted_path, "
        "Tensor num_accepted, Tensor active) -> (Tensor features, Tensor stream, Tensor position)");
}
