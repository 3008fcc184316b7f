// verify_attn on Hopper (BF16, latent 512, rope 64): products of warpgroups, keys by the tensor memory accelerator. A block
// takes 64 queries at a time, fewer are filled up; a tile of 64 keys is 9 boxes of 64 columns (wgmma.cuh). Three groups of
// 4 warps share the work and meet at barriers in shared memory only:
//   scores   S = Q K^T and softmax: the maximum moves only when it grows by more than 8 (in log2), so that rescaling is
//            rare; P goes where the tile's rope columns were, which P V does not read. It also finds the next item
//            and asks for its queries
//   values   two groups, O += P V for 256 columns of the latent each; then the first one asks for the tile after next
// A tile that a path runs through, or that is not full, is copied 16 bytes at a time. The order of additions of a query is
// that of its keys: nothing else enters it.
#pragma once
#include "verify_attn_wgmma_scores.cuh"
#include "verify_attn_wgmma_values.cuh"

namespace kdtree {

__device__ __forceinline__ void init_barriers(WgmmaShared& shared) {
  const auto init = [](uint64_t& barrier, int count) { barrier_init(shared_address(&barrier), count); };
  for (int i = 0; i < kWgmmaStages; ++i) {
    for (uint64_t& part : shared.full[i]) init(part, 1);
    init(shared.scored[i], 4);
    init(shared.empty[i], 8);
  }
  for (int i = 0; i < 2; ++i) init(shared.item_ready[i], 1);
  init(shared.queries_full, 1);
  fence_barrier_init();
}

__global__ void __launch_bounds__(kWgmmaThreads, 1)
    attn_wgmma_kernel(const __grid_constant__ AttnLaunch launch, const __grid_constant__ AttnCosts costs,
                      const __grid_constant__ AttnMaps maps) {
#if __CUDA_ARCH__ == 900
#ifndef __CUDA_ARCH_FEAT_SM90_ALL
#error "verify_attn: compile for sm_90a, not sm_90: it uses warpgroup products"
#endif
  extern __shared__ __align__(1024) unsigned char memory[];
  WgmmaShared& shared = *reinterpret_cast<WgmmaShared*>(memory + kQueries + kStageBytes);
  if (threadIdx.x == 0) {
    init_barriers(shared);
    prefetch_map(maps.keys);
    prefetch_map(maps.q_latent);
    prefetch_map(maps.q_rope);
  }
  wait_and_plan(launch, costs, shared.plan, shared.items[0]);
  const WgmmaGroup group{launch, shared, shared_address(memory)};
  const int role = __shfl_sync(0xffffffffu, int(threadIdx.x) / kWarpgroup, 0);
  if (role == 0)
    ValuesGroup<0>(group).run(maps);
  else if (role == 1)
    ValuesGroup<1>(group).run(maps);
  else
    ScoresGroup(group, maps).run();
#endif
}

}  // namespace kdtree
