// The fold of one query by a block, for a kernel that needs it at once: the bits of attn_fold_kernel (verify_attn_fold.cuh).
#pragma once
#include "verify_attn_begin.cuh"
#include "verify_attn_fold.cuh"

namespace kdtree {

constexpr int kFoldHeadLatent = 512, kFoldHeadBytes = kFoldSums * kFoldHeadLatent * int(sizeof(float));

// All 256 threads of a block: the 512 attended latents of a query of the launch, rounded, come to `out` in shared memory; NaN
// if its row is not valid. `scratch` has kFoldHeadBytes, aligned to 16. What other blocks of this kernel wrote before a
// barrier of the grid is read. Warp j takes sum j: leaves j, j + 8, … The values are there for all threads on return.
template <class Float>
__device__ __forceinline__ void fold_head(const AttnLaunch& launch, int query, float* scratch, Float* out) {
  constexpr int kAtOnce = 4, kSlices = kFoldHeadLatent / kFoldColumns;  // leaves whose loads are under way
  const int warp = int(threadIdx.x) / kWarp, lane = int(threadIdx.x) % kWarp;
  const int num_leaves = load_now(launch.num_leaves + query / int(launch.a.num_heads));
  const int64_t leaf_stride = launch.num_queries * launch.pitch;
  const float* const from = launch.partials + int64_t(query) * launch.pitch + lane * 4;
  const float2* const stats = launch.stats + int64_t(query) * launch.max_leaves;
  const QueryTotal total = total_of([stats](int leaf) { return __ldcg(stats + leaf); }, num_leaves, lane);
  float4 acc[kSlices];
#pragma unroll
  for (auto& sum : acc) sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
  for (int begin = warp; begin < num_leaves; begin += kFoldSums * kAtOnce) {
    float4 x[kAtOnce][kSlices];
    float maximum[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int leaf = begin + j * kFoldSums;
      if (leaf >= num_leaves) continue;
      maximum[j] = __ldcg(stats + leaf).x;
#pragma unroll
      for (int i = 0; i < kSlices; ++i)
        x[j][i] = __ldcg(reinterpret_cast<const float4*>(from + leaf * leaf_stride + i * kFoldColumns));
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (begin + j * kFoldSums >= num_leaves) continue;
      const float weight = exp2f(__fsub_rn(maximum[j], total.largest));
#pragma unroll
      for (int i = 0; i < kSlices; ++i) add_weighted(acc[i], weight, x[j][i]);
    }
  }
  float4* const partial = reinterpret_cast<float4*>(scratch);
#pragma unroll
  for (int i = 0; i < kSlices; ++i) partial[(warp * kSlices + i) * kWarp + lane] = acc[i];
  __syncthreads();
  if (threadIdx.x < kFoldHeadLatent / 4) {
    float4 sum = partial[threadIdx.x];
#pragma unroll
    for (int j = 1; j < kFoldSums; ++j) add_to(sum, partial[j * (kFoldHeadLatent / 4) + threadIdx.x]);
    store_columns(out + threadIdx.x * 4, 4, sum, num_leaves > 0 ? total.inverse_sum : NAN);
  }
  __syncthreads();
}

}  // namespace kdtree
