// block_attn: attention of a drafter's block, in one launch: norms and angles of its heads, context and block, and the fold.
#include "block_attn_mma.cuh"
#include "block_attn_simt.cuh"

namespace kdtree {
namespace {

template <class Worker>
int launch_worker(const BlockAttnArgs& a, void* stream) {
  const int64_t num_tiles = ceil_div(a.block_size * (a.num_heads / a.num_kv_heads), kTileRows);
  const int64_t num_heads = a.num_blocks * a.num_kv_heads * ceil_div(a.dim, Worker::kWidth);
  if (num_tiles > 65535 || num_heads > 65535) return kUnsupported;  // the limits of grid.y and grid.z
  const int dim = int(a.dim), block_size = int(a.block_size);
  using Memory = AttnMemory<typename Worker::Float, typename Worker::Stored>;
  const auto bytes = [](int at_block_size, int at_dim) {
    return Memory::bytes(Worker::query_stride(at_dim), at_block_size, at_dim, Worker::kScratch);
  };
  return launch(block_attn_kernel<Worker>,
                {dim3(kAttnCluster, num_tiles, num_heads), dim3(kAttnThreads), bytes(block_size, dim), kAttnCluster,
                 Start::kEarly, bytes(kMaxBlockSize, kMaxHeadDim)},
                stream, a);
}

int launch_mma(const BlockAttnArgs& a, void* stream) {
  if (a.dim <= 32) return launch_worker<MmaWorker<1>>(a, stream);
  if (a.dim <= 64) return launch_worker<MmaWorker<2>>(a, stream);
  if (a.dim <= 128) return launch_worker<MmaWorker<4>>(a, stream);
  return launch_worker<MmaWorker<8>>(a, stream);
}

template <class Float>
int launch_simt(const BlockAttnArgs& a, void* stream) {
  if (a.dim <= 64) return launch_worker<SimtWorker<Float, 2, 64>>(a, stream);
  return launch_worker<SimtWorker<Float, 4, kMaxHeadDim>>(a, stream);
}

}  // namespace

int block_attn_cuda(const BlockAttnArgs& a, void* stream) {
  if (a.dim % 2 || a.dim < 2 || a.dim > kMaxHeadDim || a.block_size > kMaxBlockSize) return kUnsupported;
  if (a.num_slots > INT32_MAX || a.num_positions > INT32_MAX) return kUnsupported;
  if (a.num_blocks == 0 || a.block_size == 0 || a.num_heads == 0) return kOk;
  if (a.dtype == kBF16 && a.dim % kChunk == 0) return launch_mma(a, stream);
  return with_dtype(a.dtype, [&](auto element) { return launch_simt<decltype(element)>(a, stream); });
}

}  // namespace kdtree
