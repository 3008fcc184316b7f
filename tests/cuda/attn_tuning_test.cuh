// Tuning of verify_attn that a test may replace, to see that none of it touches the bits. Included before
// verify_attn.cu.
#pragma once
#include "verify_attn_plan.cuh"

namespace kdtree {
inline AttnTuning test_tuning = kAttnTuning;
}  // namespace kdtree

// Query tiles of 2^log2_rows (0: any; Hopper's kernel has one), runs as long (item_cost large) or as short (0) as can be,
// at most so many blocks; Hopper's kernel or the one of other GPUs.
extern "C" void tune_attn(int log2_rows, float item_cost, int blocks, int uses_wgmma) {
  using namespace kdtree;
  test_tuning = kAttnTuning;
  if (log2_rows) test_tuning.mma.min_log2_rows = test_tuning.mma.max_log2_rows = log2_rows;
  if (item_cost >= 0)
    for (AttnCosts* costs : {&test_tuning.mma, &test_tuning.wgmma})
      for (float& cost : costs->per_item) cost = item_cost;
  test_tuning.max_blocks = blocks;
  test_tuning.uses_wgmma = uses_wgmma != 0;
}
#define KDTREE_ATTN_TUNING test_tuning
