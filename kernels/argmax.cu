// argmax: the lowest id of the largest logit. A cluster of 8 blocks shares one row; every comparison is exact, so the
// order does not matter.
#include <cooperative_groups.h>

#include "cuda_rows.cuh"
#include "ordered_bits.cuh"

namespace kdtree {
namespace {

namespace cg = cooperative_groups;
constexpr int kThreads = 256, kCluster = 8;
constexpr uint64_t kNanKey = ~uint64_t{0};  // above every other key

// Larger logit first, then lower id, when compared as an integer.
__device__ __forceinline__ uint64_t make_key(float logit, int64_t id) {
  return logit != logit ? kNanKey : uint64_t(rising_bits(logit)) << 32 | uint32_t(~uint32_t(id));
}

__device__ __forceinline__ uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }

__global__ void __launch_bounds__(kThreads) argmax_kernel(ArgmaxArgs a) {
  __shared__ uint64_t warp_best[kThreads / kWarp], block_best;
  wait_for_previous_kernel();
  allow_next_kernel();
  const cg::cluster_group cluster = cg::this_cluster();
  const int64_t row = blockIdx.y;
  if (row >= rows_in_use(a.num_rows_device, a.num_rows)) return;  // all blocks of a cluster alike
  const float* logits = a.logits + row * a.vocab_size;
  uint64_t best = 0;
  for (int64_t i = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * kChunk; i < a.vocab_size;
       i += int64_t{kCluster} * kThreads * kChunk) {
    float v[kChunk];
    load_chunk(logits + i, a.vocab_size - i, v);
#pragma unroll
    for (int k = 0; k < kChunk; ++k)
      if (i + k < a.vocab_size) best = larger(best, make_key(v[k], i + k));
  }
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) best = larger(best, __shfl_xor_sync(0xffffffffu, best, offset));
  if (threadIdx.x % kWarp == 0) warp_best[threadIdx.x / kWarp] = best;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kThreads / kWarp; ++w) best = larger(best, warp_best[w]);
    block_best = best;
  }
  cluster.sync();
  if (cluster.block_rank() == 0 && threadIdx.x == 0) {
    for (int b = 1; b < kCluster; ++b) best = larger(best, *cluster.map_shared_rank(&block_best, b));
    a.token[row] = best == kNanKey ? -1 : int64_t(~uint32_t(best));
  }
  cluster.sync();  // a block's shared memory must outlive its readers
}

}  // namespace

int argmax_cuda(const ArgmaxArgs& a, void* stream) {
  if (a.vocab_size < 1 || a.vocab_size > int64_t{1} << 31) return kUnsupported;
  if (a.num_rows > 65535) return kUnsupported;  // the limit of grid.y
  if (a.num_rows == 0) return kOk;
  return launch(argmax_kernel, {dim3(kCluster, a.num_rows), dim3(kThreads), 0, kCluster, true}, stream, a);
}

}  // namespace kdtree
