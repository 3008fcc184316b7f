// The best of a row whose elements are spread over a cluster of 8 blocks, by keys that compare as integers: exact, so that
// the order does not matter.
#pragma once
#include <cooperative_groups.h>

#include "cuda_common.cuh"

namespace kdtree {

constexpr int kRowCluster = 8;
constexpr uint64_t kNanKey = ~uint64_t{0};  // above every other key

__device__ __forceinline__ uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }

__device__ __forceinline__ uint64_t warp_largest(uint64_t key) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) key = larger(key, __shfl_xor_sync(0xffffffffu, key, offset));
  return key;
}

// The largest key of the block, in the first warp.
template <int kThreads>
__device__ __forceinline__ uint64_t block_largest(uint64_t key) {
  __shared__ uint64_t warp_best[kThreads / kWarp];
  key = warp_largest(key);
  __syncthreads();
  if (threadIdx.x % kWarp == 0) warp_best[threadIdx.x / kWarp] = key;
  __syncthreads();
  return warp_largest(threadIdx.x < kThreads / kWarp ? warp_best[threadIdx.x] : 0);
}

// The largest key of the cluster, in every thread. `block_best` is in shared memory, and nobody else's until the next
// cluster.sync().
template <int kThreads>
__device__ __forceinline__ uint64_t cluster_largest(const cooperative_groups::cluster_group& cluster, uint64_t key,
                                                    uint64_t& block_best) {
  key = block_largest<kThreads>(key);
  if (threadIdx.x == 0) block_best = key;
  cluster.sync();
  const int lane = threadIdx.x % kWarp;
  return warp_largest(lane < kRowCluster ? *cluster.map_shared_rank(&block_best, lane) : 0);
}

}  // namespace kdtree
