// What the operations on vocabularies, trees and steps may be called with; see op_checks.h.
#pragma once
#include "../accepted_token.h"
#include "../partials.h"
#include "../sampling.h"
#include "../segments.h"
#include "../tree_walk.h"
#include "checks.h"

namespace kdtree::capi {

inline void check(const ArgmaxArgs& a, Checks& c) {
  c.sizes({{"num_rows", a.num_rows}});
  c.range("vocab_size", a.vocab_size, 1, kMaxSize);
  c.array("logits", a.logits, {a.num_rows, a.vocab_size}, "[T, V]");
  c.array("token", a.token, {a.num_rows}, "[T]");
  c.num_threads(a.num_threads);
  c.num_rows_device(a.num_rows_device);
}

// How rows are sampled, of whatever struct: SampleArgs or SampleAmongArgs.
template <class Args>
void sampling_arrays(const Args& a, Checks& c) {
  c.array("stream", a.stream, {a.num_rows}, "[T]");
  c.array("position", a.position, {a.num_rows}, "[T]");
  c.array("temperature", a.temperature, {a.num_streams}, "[S]");
  c.array("top_k", a.top_k, {a.num_streams}, "[S]");
  c.array("top_p", a.top_p, {a.num_streams}, "[S]");
  c.array("seed", a.seed, {a.num_streams}, "[S]");
}

template <class Args>
void explain_sampling(const Args& a, Checks& c) {
  c.values("stream", a.stream, a.num_rows, 0, a.num_streams - 1);
  c.values("position", a.position, a.num_rows, 0, kMaxIndex);
  c.values("top_k", a.top_k, a.num_streams, 0, kMaxTopK);
  c.out_of_range("expected temperatures that are 0 or positive, normal and finite, and top_p above 0 and at most 1, "
                 "got others");
}

inline void check(const SampleArgs& a, Checks& c) {
  c.sizes({{"num_rows", a.num_rows}});
  c.range("vocab_size", a.vocab_size, 1, kMaxSize);
  c.range("num_streams", a.num_streams, 0, kMaxIndex);
  c.array("logits", a.logits, {a.num_rows, a.vocab_size}, "[T, V]");
  sampling_arrays(a, c);
  c.array("token", a.token, {a.num_rows}, "[T]");
  c.num_threads(a.num_threads);
  c.num_rows_device(a.num_rows_device);
}

inline void explain(const SampleArgs& a, Checks& c) { explain_sampling(a, c); }

inline void check(const SampleAmongArgs& a, Checks& c) {
  c.sizes({{"num_rows", a.num_rows}, {"num_words", a.num_words}});
  c.range("vocab_size", a.vocab_size, 1, kMaxSize);
  c.range("num_streams", a.num_streams, 0, kMaxIndex);
  c.array("words", a.words, {a.num_rows, a.num_words}, "[T, M]");
  c.array("largest", a.largest, {a.num_rows}, "[T]");
  sampling_arrays(a, c);
  c.array("word", a.word, {a.num_rows}, "[T]");
  c.num_threads(a.num_threads);
  c.num_rows_device(a.num_rows_device);
}

inline void explain(const SampleAmongArgs& a, Checks& c) { explain_sampling(a, c); }

inline void check_sizes(const DraftTopkArgs& a, Checks& c) {
  c.dtype("dtype", a.dtype);
  c.sizes({{"num_rows", a.num_rows}});
  c.range("vocab_size", a.vocab_size, 1, kMaxIndex);
  c.range("num_candidates", a.num_candidates, 1, a.num_segments ? a.whole_vocab : a.vocab_size);
  c.expect(SegmentShare{a.whole_vocab, a.first_segment, a.num_segments}.fits(a.vocab_size),
           "whole_vocab, first_segment, num_segments: expected segments of vocab_size tokens, got others");
}

inline void check(const DraftTopkArgs& a, Checks& c) {
  check_sizes(a, c);
  c.floats("logits", a.logits, a.dtype, {a.num_rows, a.vocab_size}, "[B, L, V]");
  if (a.num_segments > 0) {
    c.array("words", a.words, {a.num_rows, a.num_candidates + a.num_segments}, "[B, L, K + num_segments]");
  } else {
    c.array("log_probs", a.log_probs, {a.num_rows, a.num_candidates}, "[B, L, K]");
    c.array("token_ids", a.token_ids, {a.num_rows, a.num_candidates}, "[B, L, K]");
  }
  c.num_threads(a.num_threads);
}

inline void check(const DraftTopkMergeArgs& a, Checks& c) {
  c.sizes({{"num_rows", a.num_rows}});
  c.expect(is_num_partials(a.num_partials), "num_partials: expected 1, 2, 4 or 8, got another number");
  c.range("num_candidates", a.num_candidates, 1, kMaxIndex / 16);
  const int64_t num_segments = is_num_partials(a.num_partials) ? kNumSegments / a.num_partials : 0;
  c.array("words", a.words, {a.num_partials, a.num_rows, a.num_candidates + num_segments}, "[P, B, L, K + 8 / P]");
  c.array("log_probs", a.log_probs, {a.num_rows, a.num_candidates}, "[B, L, K]");
  c.array("token_ids", a.token_ids, {a.num_rows, a.num_candidates}, "[B, L, K]");
  c.num_threads(a.num_threads);
}

inline void check(const TreeBuildArgs& a, Checks& c) {
  c.range("num_streams", a.num_streams, 0, kMaxIndex);
  c.range("max_depth", a.max_depth, 0, kMaxIndex);
  c.range("num_candidates", a.num_candidates, 0, kMaxIndex);
  c.range("max_budget", a.max_budget, 0, kMaxBudget);
  const int64_t num_slots = a.max_budget + 1;
  c.array("log_probs", a.log_probs, {a.num_streams, a.max_depth, a.num_candidates}, "[B, L, K]");
  c.array("token_ids", a.token_ids, {a.num_streams, a.max_depth, a.num_candidates}, "[B, L, K]");
  c.array("bonus", a.bonus, {a.num_streams}, "[B]");
  c.array("budget", a.budget, {a.num_streams}, "[B]");
  c.array("token", a.token, {a.num_streams, num_slots}, "[B, N]");
  c.array("parent", a.parent, {a.num_streams, num_slots}, "[B, N]");
  c.array("depth", a.depth, {a.num_streams, num_slots}, "[B, N]");
  c.array("log_prob", a.log_prob, {a.num_streams, num_slots}, "[B, N]");
  c.array("ancestor_bits", a.ancestor_bits, {a.num_streams, num_slots, num_bit_words(num_slots)}, "[B, N, ceil(N/64)]");
  c.array("num_nodes", a.num_nodes, {a.num_streams}, "[B]");
  c.array("status", a.status, {a.num_streams}, "[B]");
}

inline void explain(const TreeBuildArgs& a, Checks& c) {
  c.values("budget", a.budget, a.num_streams, 0, a.max_budget);
  c.values("bonus", a.bonus, a.num_streams, 0, INT64_MAX);
}

inline void check(const TreeRowsArgs& a, Checks& c) {
  c.range("num_streams", a.num_streams, 0, kMaxIndex);
  c.range("num_tree_slots", a.num_tree_slots, 0, kMaxIndex);
  c.array("token", a.token, {a.num_streams, a.num_tree_slots}, "[B, N]");
  c.array("depth", a.depth, {a.num_streams, a.num_tree_slots}, "[B, N]");
  c.array("num_nodes", a.num_nodes, {a.num_streams}, "[B]");
  c.array("prefix_len", a.prefix_len, {a.num_streams}, "[B]");
  c.array("row_stream", a.row_stream, {a.num_streams, a.num_tree_slots}, "[T]");
  c.array("row_node", a.row_node, {a.num_streams, a.num_tree_slots}, "[T]");
  c.array("row_position", a.row_position, {a.num_streams, a.num_tree_slots}, "[T]");
  c.array("row_slot", a.row_slot, {a.num_streams, a.num_tree_slots}, "[T]");
  c.array("row_token", a.row_token, {a.num_streams, a.num_tree_slots}, "[T]");
  c.optional("row_begin", a.row_begin, sizeof(int32_t), "[B]");
  c.num_rows_device(a.num_rows_device);
}

inline void explain(const TreeRowsArgs& a, Checks& c) {
  c.values("num_nodes", a.num_nodes, a.num_streams, 0, a.num_tree_slots);
  c.values("prefix_len", a.prefix_len, a.num_streams, 0, kMaxIndex - a.num_tree_slots);
}

inline void check(const TreeAcceptArgs& a, Checks& c) {
  c.range("num_streams", a.num_streams, 0, kMaxIndex);
  c.range("num_tree_slots", a.num_tree_slots, 0, kMaxIndex);
  c.range("max_depth", a.max_depth, 0, kMaxIndex);
  c.array("token", a.token, {a.num_streams, a.num_tree_slots}, "[B, N]");
  c.array("parent", a.parent, {a.num_streams, a.num_tree_slots}, "[B, N]");
  c.array("num_nodes", a.num_nodes, {a.num_streams}, "[B]");
  c.array("target_token", a.target_token, {a.num_streams, a.num_tree_slots}, "[B, N]");
  c.array("accepted_path", a.accepted_path, {a.num_streams, a.max_depth}, "[B, L]");
  c.array("num_accepted", a.num_accepted, {a.num_streams}, "[B]");
  c.array("next_token", a.next_token, {a.num_streams}, "[B]");
  c.optional("row_begin", a.row_begin, sizeof(int32_t), "[B]");
}

inline void explain(const TreeAcceptArgs& a, Checks& c) {
  c.values("num_nodes", a.num_nodes, a.num_streams, 0, a.num_tree_slots);
  c.out_of_range("max_depth: expected at least the length of the accepted path, got less");
}

inline void check(const StepCommitArgs& a, Checks& c) {
  c.range("num_streams", a.num_streams, 0, kMaxIndex);
  c.range("max_depth", a.max_depth, 0, kMaxIndex);
  c.sizes({{"num_rows", a.num_rows}, {"vocab_size", a.vocab_size}, {"num_text_slots", a.num_text_slots}});
  c.range("ring_size", a.ring_size, 1, kMaxSize);
  c.array("accepted_path", a.accepted_path, {a.num_streams, a.max_depth}, "[S, L]");
  c.array("num_accepted", a.num_accepted, {a.num_streams}, "[S]");
  c.array("num_nodes", a.num_nodes, {a.num_streams}, "[S]");
  c.array("target_token", a.target_token, {a.num_rows}, "[T]");
  c.array("row_begin", a.row_begin, {a.num_streams}, "[S]");
  c.array("is_stop", a.is_stop, {a.vocab_size}, "[V]");
  c.array("prefix_len", a.prefix_len, {a.num_streams}, "[S]");
  c.array("bonus", a.bonus, {a.num_streams}, "[S]");
  c.array("remaining", a.remaining, {a.num_streams}, "[S]");
  c.array("active", a.active, {a.num_streams}, "[S]");
  c.array("text", a.text, {a.num_streams, a.num_text_slots}, "[S, P]");
  c.array("ring", a.ring, {a.ring_size, kRecordToken + 1 + a.max_depth, a.num_streams}, "[R, 4 + 1 + L, S]");
  c.array("step", a.step, {1}, "[1]");
  if (c.on_cpu()) c.values("step", a.step, 1, 0, INT64_MAX);
}

inline void explain(const StepCommitArgs&, Checks& c) {
  c.out_of_range("expected accepted nodes below num_nodes, rows and tokens inside their arrays, room in the text, and "
                 "active streams that may still emit, got others");
}

inline void check(const AcceptedFeaturesArgs& a, Checks& c) {
  c.dtype("dtype", a.dtype);
  c.range("num_layers", a.num_layers, 1, kMaxFeatureLayers);
  c.range("num_streams", a.num_streams, 0, kMaxIndex);
  c.range("max_depth", a.max_depth, 0, kMaxIndex);
  c.sizes({{"num_rows", a.num_rows}, {"dim", a.dim}});
  const char* names[kMaxFeatureLayers] = {"hidden_0", "hidden_1", "hidden_2", "hidden_3",
                                          "hidden_4", "hidden_5", "hidden_6", "hidden_7"};
  for (int64_t layer = 0; c.status() == KDTREE_OK && layer < a.num_layers; ++layer)
    c.floats(names[layer], hidden_of(a, layer), a.dtype, {a.num_rows, a.dim}, "[T, D]");
  c.array("first_row", a.first_row, {a.num_streams}, "[S]");
  c.array("prefix_len", a.prefix_len, {a.num_streams}, "[S]");
  c.array("accepted_path", a.accepted_path, {a.num_streams, a.max_depth}, "[S, L]");
  c.array("num_accepted", a.num_accepted, {a.num_streams}, "[S]");
  c.array("active", a.active, {a.num_streams}, "[S]");
  c.floats("features", a.features, a.dtype, {a.num_streams, a.max_depth + 1, a.num_layers, a.dim}, "[S, L + 1, n, D]");
  c.array("stream", a.stream, {a.num_streams, a.max_depth + 1}, "[S, L + 1]");
  c.array("position", a.position, {a.num_streams, a.max_depth + 1}, "[S, L + 1]");
}

inline void explain(const AcceptedFeaturesArgs&, Checks& c) {
  c.out_of_range("expected at most max_depth accepted nodes, rows below num_rows and positions from 0, got others");
}

}  // namespace kdtree::capi
