// What moe_experts keeps between its kernels: how many rows a chunk has, who groups its pairs (row, expert) and where what lies.
#pragma once
#include "linear_shape.cuh"

namespace kdtree {

constexpr int64_t kMaxPartialBytes = int64_t(1) << 30;  // more rows than fit are done in chunks

struct ExpertWorkspace {
  int64_t num_rows, num_pairs;  // of a chunk
  int rows_per_item;            // of one expert, at most
  bool is_grouped;              // by a kernel before the products, or each block finds the pairs of its expert itself
  int64_t max_items, num_bytes = 0;
  int64_t num_items, items, pairs, gate_up, hidden, partials, shared_gate_up, shared_hidden, shared_partials;

  explicit ExpertWorkspace(const MoeExpertsArgs& a) {
    const int64_t size = a.dtype == kF32 ? 4 : 2, shared = a.shared_gate_up ? 1 : 0;
    const int64_t partial_bytes = (a.top_k + shared) * kNumSegments * a.dim * 4;
    num_rows = std::min(a.num_rows, std::max<int64_t>(1, kMaxPartialBytes / std::max<int64_t>(1, partial_bytes)));
    num_pairs = num_rows * a.top_k;
    // Few rows an expert, small tiles: up to 4.5 of them, so that 64 experts have small ones for 72 rows that take four each.
    rows_per_item = num_rows <= 8 || 2 * num_pairs <= 9 * a.num_experts ? 8
                    : a.dtype == kF32 || num_pairs <= 24 * a.num_experts ? 32 : 64;
    is_grouped = rows_per_item != kRowsOfPairs || num_pairs > kMaxPairs;
    max_items = is_grouped ? std::min(a.num_experts, num_pairs) + num_pairs / rows_per_item : num_pairs;
    num_items = take(is_grouped ? 4 : 0);
    items = take(is_grouped ? max_items * sizeof(int4) : 0);
    pairs = take(is_grouped ? num_pairs * 4 : 0);
    gate_up = take(num_pairs * 2 * a.width * size);
    hidden = take(num_pairs * a.width * size);
    partials = take(num_pairs * kNumSegments * a.dim * 4);
    shared_gate_up = take(shared * num_rows * 2 * a.shared_width * size);
    shared_hidden = take(shared * num_rows * a.shared_width * size);
    shared_partials = take(shared * num_rows * kNumSegments * a.dim * 4);
  }

  int64_t take(int64_t count) {
    const int64_t at = num_bytes;
    num_bytes += ceil_div(count, 256) * 256;
    return at;
  }
};

}  // namespace kdtree
