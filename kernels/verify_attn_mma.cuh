// verify_attn with tensor cores (mma.sync, BF16) for fixed dimensions. A block of 8 warps takes M queries at a time:
//   S = Q K^T   the C + R long reduction is cut into 4 quarters of 16-element steps; a warp owns one quarter, its queries
//               stay in registers, and the 4 partial scores meet in shared memory as (p0 + p1) + (p2 + p3)
//   softmax     a warp owns 8 queries; the maximum moves only when it grows by more than 8 (in log2), so that rescaling the
//               accumulators is rare. Maxima and sums of a tile go over 4 lanes by shuffles
//   O += P V    a warp owns a share of the latent's columns for all queries
// A tile of keys comes by cp.async, 16 bytes at a time, so a path costs what a stretch of the prefix costs. Leaves
// start from nothing and end in the workspace. The order of additions is a constant of (C, R, tile length): M, stages
// and the number of leaves in an item do not enter it.
#pragma once
#include "verify_attn_mma_worker.cuh"

namespace kdtree {

template <class S>
__global__ void __launch_bounds__(kMmaThreads, 1)
    attn_mma_kernel(const __grid_constant__ AttnLaunch launch, const __grid_constant__ AttnCosts costs) {
  extern __shared__ __align__(1024) unsigned char memory[];
  AttnPlan& plan = *reinterpret_cast<AttnPlan*>(memory + S::kPlan);
  AttnWork& work = *reinterpret_cast<AttnWork*>(memory + S::kWork);
  wait_and_plan(launch, costs, plan, work.item);
  int* scratch = reinterpret_cast<int*>(memory);
  bool is_found = true;
  for (uint32_t ticket = blockIdx.x; begin_item(launch, plan, work, ticket, is_found, scratch);
       ticket = work.next_ticket) {
    is_found = false;
    if (work.item.end == work.item.begin) {
      if (threadIdx.x == 0) work.next_ticket = draw_ticket(launch, plan);
    } else if (work.item.log2_rows == 4) {
      MmaWorker<S, 16>(launch, plan, work, memory).run();
    } else if (work.item.log2_rows == 5) {
      MmaWorker<S, 32>(launch, plan, work, memory).run();
    } else {
      MmaWorker<S, 64>(launch, plan, work, memory).run();
    }
    __syncthreads();
  }
}

}  // namespace kdtree
