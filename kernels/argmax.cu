// argmax: the lowest id of the largest logit. A cluster of 8 blocks shares one row; every comparison is exact, so the
// order does not matter.
#include "cuda_rows.cuh"
#include "ordered_bits.cuh"
#include "row_best.cuh"

namespace kdtree {
namespace {

constexpr int kThreads = 256;

// Larger logit first, then lower id, when compared as an integer.
__device__ __forceinline__ uint64_t make_key(float logit, int64_t id) {
  return logit != logit ? kNanKey : uint64_t(rising_bits(logit)) << 32 | uint32_t(~uint32_t(id));
}

__global__ void __launch_bounds__(kThreads) argmax_kernel(ArgmaxArgs a) {
  __shared__ uint64_t block_best;
  wait_for_previous_kernel();
  allow_next_kernel();
  const auto cluster = cooperative_groups::this_cluster();
  const int64_t row = blockIdx.y;
  if (row >= rows_in_use(a.num_rows_device, a.num_rows)) return;  // all blocks of a cluster alike
  const float* logits = a.logits + row * a.vocab_size;
  uint64_t best = 0;
  for (int64_t i = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * kChunk; i < a.vocab_size;
       i += int64_t{kRowCluster} * kThreads * kChunk) {
    float v[kChunk];
    load_chunk(logits + i, a.vocab_size - i, v);
#pragma unroll
    for (int k = 0; k < kChunk; ++k)
      if (i + k < a.vocab_size) best = larger(best, make_key(v[k], i + k));
  }
  best = cluster_largest<kThreads>(cluster, best, block_best);
  if (cluster.block_rank() == 0 && threadIdx.x == 0) a.token[row] = best == kNanKey ? -1 : int64_t(~uint32_t(best));
  cluster.sync();  // a block's shared memory must outlive its readers
}

}  // namespace

int argmax_cuda(const ArgmaxArgs& a, void* stream) {
  if (a.vocab_size < 1 || a.vocab_size > int64_t{1} << 31) return kUnsupported;
  if (a.num_rows > 65535) return kUnsupported;  // the limit of grid.y
  if (a.num_rows == 0) return kOk;
  return launch(argmax_kernel, {dim3(kRowCluster, a.num_rows), dim3(kThreads), 0, kRowCluster, Start::kEarly}, stream, a);
}

}  // namespace kdtree
