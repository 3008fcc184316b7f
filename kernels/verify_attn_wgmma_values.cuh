// The two groups of attn_wgmma_kernel that add P V up. See verify_attn_wgmma.cuh.
#pragma once
#include "verify_attn_wgmma_group.cuh"

namespace kdtree {

// kHalf: which 256 columns.
template <int kHalf>
struct ValuesGroup : WgmmaGroup {
  float acc[128];

  __device__ __forceinline__ explicit ValuesGroup(const WgmmaGroup& group) : WgmmaGroup(group) {}

  __device__ __forceinline__ void run(const AttnMaps& maps) {
#pragma unroll 1
    for (RingPlace at;; at = at.after(1)) {
      wait(shared.scored[at.stage()], at.phase());
      const ValuesTask task = shared.task[at.stage()];
      if (task.kind & ValuesTask::kNoMore) return;
      if (shared.grows[at.stage()][thread / kWarp]) rescale(at.stage());
      add_values(stage_at(at.stage()), task.kind & ValuesTask::kStartsLeaf);
      arrive(shared.empty[at.stage()]);
      if (kHalf == 0 && warp() < kParts && task.next_key >= 0) {
        wait(shared.empty[at.stage()], at.phase());
        ask_part(maps.keys, task.next_key, at.stage(), warp());
      }
      if (task.kind & ValuesTask::kEndsLeaf) flush(task.sums, task.num_queries);
    }
  }

  __device__ __forceinline__ void add_values(uint32_t tile, bool fresh) {
    const uint64_t probs = tile_descriptor(tile + kRopeBox);
    const uint64_t values = tile_descriptor(tile + kHalf * 4 * kTileBytes, kTileBytes);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma_64x256(acc, probs + k * 2, values + k * (16 * 128 / 16), fresh && k == 0);
    wgmma_commit();
    wgmma_wait();
    pin(acc);
  }

  __device__ __forceinline__ void rescale(int stage) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float alpha = shared.alpha[stage][row() + 8 * h];
#pragma unroll
      for (int b = 0; b < 32; ++b)
#pragma unroll
        for (int c = 0; c < 2; ++c) acc[b * 4 + 2 * h + c] = __fmul_rn(acc[b * 4 + 2 * h + c], alpha);
    }
  }

  // A leaf is complete: its sums go to the workspace.
  __device__ __forceinline__ void flush(float* sums, int num_queries) const {
    const int first = row();
    float* to = sums + first * kWgmmaLatent + kHalf * 256 + 2 * (thread % 4);
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (first + 8 * h < num_queries)
#pragma unroll
        for (int b = 0; b < 32; ++b)
          *reinterpret_cast<float2*>(to + 8 * h * kWgmmaLatent + b * 8) =
              make_float2(acc[b * 4 + 2 * h], acc[b * 4 + 2 * h + 1]);
  }
};

}  // namespace kdtree
