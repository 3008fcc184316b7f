// Tuning of verify_attn that a test may replace, to see that none of it touches the bits. Included before
// verify_attn.cu.
#pragma once
#include "verify_attn_plan.cuh"

namespace kdtree {
constexpr AttnCosts kUsualMmaCosts{{0.038f, 0.054f, 0.062f}, {0.4f, 0.8f, 1.5f}, {3.0f, 4.5f, 5.5f}, 4, 6};
inline AttnCosts test_costs = kUsualMmaCosts;
inline int test_shared_bytes = 1 << 30, test_blocks = 1 << 30;
}  // namespace kdtree

// Query tiles of 2^log2_rows (0: any), runs as long (item_cost large) or as short (0) as can be, at most so many blocks
// and so much shared memory.
extern "C" void tune_attn(int log2_rows, float item_cost, int blocks, int shared_bytes) {
  using namespace kdtree;
  test_costs = kUsualMmaCosts;
  if (log2_rows) test_costs.min_log2_rows = test_costs.max_log2_rows = log2_rows;
  if (item_cost >= 0)
    for (float& cost : test_costs.per_item) cost = item_cost;
  test_blocks = blocks;
  test_shared_bytes = shared_bytes;
}
#define KDTREE_ATTN_COSTS test_costs
#define KDTREE_ATTN_MAX_BLOCKS test_blocks
#define KDTREE_ATTN_MAX_SHARED_BYTES test_shared_bytes
