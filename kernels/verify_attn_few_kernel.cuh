// attend_few as a kernel of its own (verify_attn_few.cuh).
#pragma once
#include "verify_attn_few.cuh"

namespace kdtree {

constexpr int kFewStages = 2;  // of the kernel by itself

__global__ void __launch_bounds__(kFewThreads, 1)
    attn_few_kernel(const __grid_constant__ AttnLaunch launch, const __grid_constant__ FewCosts costs) {
#if __CUDA_ARCH__ == 900
  extern __shared__ __align__(1024) unsigned char memory[];
  const int lane = int(threadIdx.x) % kWarp, blocks = int(gridDim.x);
  const OneStream early = look_at_stream(launch);
  if (threadIdx.x < kWarp) prefetch_keys(launch, early.prefix, lane);
  FewPlan plan = plan_few(launch, costs, early, blocks, lane);  // of what lies there by now, which may be old
  wait_for_previous_kernel();
  allow_next_kernel();
  const OneStream now = look_at_stream(launch);
  if (now.num_rows != early.num_rows || now.prefix != early.prefix) plan = plan_few(launch, costs, now, blocks, lane);
  attend_few<kFewStages>(launch, plan, launch.a.cache, memory, int(blockIdx.x), blocks);
#endif
}

}  // namespace kdtree
