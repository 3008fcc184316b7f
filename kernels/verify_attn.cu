// verify_attn: attention of tree nodes over the latent cache, split over the keys. First every leaf of every query
// (attn_leaves.h) becomes a partial result (maximum, sum, weighted latents) in the workspace; then `fold` adds the
// leaves of a query in a fixed order of their index. Both read prefix lengths and row counts on the device.
#include "verify_attn_mma.cuh"
#include "verify_attn_simt.cuh"

namespace kdtree {
namespace {

constexpr int kFoldThreads = 256, kFoldWarps = kFoldThreads / kWarp, kFoldSums = 8, kFoldColumns = 4 * kWarp;
constexpr int64_t kManyQueries = 1024;  // from here on, one warp folds a query's columns alone

__device__ __forceinline__ void add_weighted(float4& acc, float weight, const float4& x) {
  acc.x = __fmaf_rn(weight, x.x, acc.x);
  acc.y = __fmaf_rn(weight, x.y, acc.y);
  acc.z = __fmaf_rn(weight, x.z, acc.z);
  acc.w = __fmaf_rn(weight, x.w, acc.w);
}
__device__ __forceinline__ void add_to(float4& acc, const float4& x) {
  acc.x = __fadd_rn(acc.x, x.x);
  acc.y = __fadd_rn(acc.y, x.y);
  acc.z = __fadd_rn(acc.z, x.z);
  acc.w = __fadd_rn(acc.w, x.w);
}

// Maximum over the leaves, and 1 / the sum over them of exp2(maximum - largest) * sum: lanes take leaves lane, lane +
// 32, …
struct QueryTotal {
  float largest, inverse_sum;
};

__device__ __forceinline__ QueryTotal total_of(const float2* stats, int num_leaves, int lane) {
  float largest = -INFINITY, sum = 0.0f;
  for (int c = lane; c < num_leaves; c += kWarp) largest = fmaxf(largest, stats[c].x);
  largest = warp_max(largest);
  for (int c = lane; c < num_leaves; c += kWarp)
    sum = __fmaf_rn(exp2f(__fsub_rn(stats[c].x, largest)), stats[c].y, sum);
  return {largest, __fdiv_rn(1.0f, warp_sum(sum))};
}

template <class Float>
__device__ __forceinline__ void store_columns(Float* out, int count, const float4& acc, float scale) {
  const float v[4] = {acc.x, acc.y, acc.z, acc.w};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (i < count) out[i] = from_float<Float>(__fmul_rn(v[i], scale));
}

// kSplit: adds the leaves first, first + 8, … to one sum; otherwise all leaves, leaf c to sum c % 8.
template <bool kSplit>
__device__ __forceinline__ void add_leaves(float4 (&acc)[kSplit ? 1 : kFoldSums], const float* from,
                                           int64_t leaf_stride, const float2* stats, int num_leaves, int first,
                                           float largest) {
  constexpr int kBatch = 8, kStep = kSplit ? kFoldSums : 1;
  for (int begin = first; begin < num_leaves; begin += kBatch * kStep) {
    float4 x[kBatch];
    float weight[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int leaf = begin + j * kStep;
      if (leaf >= num_leaves) continue;
      x[j] = __ldcs(reinterpret_cast<const float4*>(from + leaf * leaf_stride));
      weight[j] = exp2f(__fsub_rn(stats[leaf].x, largest));
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j)
      if (begin + j * kStep < num_leaves) add_weighted(acc[kSplit ? 0 : j], weight[j], x[j]);
  }
}

// A piece is 128 columns of a query. kSplit: a block takes a piece, warp j the leaves j, j + 8, …; otherwise a warp
// takes a piece alone. The order of additions is the same: sum j over the leaves j (mod 8), then the 8 sums in order.
template <class Float, bool kSplit>
__global__ void __launch_bounds__(kFoldThreads) attn_fold_kernel(const __grid_constant__ AttnLaunch launch) {
  __shared__ float4 partial[kSplit ? kFoldSums : 1][kWarp];
  wait_for_previous_kernel();
  allow_next_kernel();
  const VerifyAttnArgs& a = launch.a;
  if (blockIdx.x == 0 && threadIdx.x == 0) *launch.tickets = 0;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int num_heads = int(a.num_heads), latent = int(a.latent_dim);
  const int slices = (latent + kFoldColumns - 1) / kFoldColumns;
  const int num_pieces = rows_in_use(a.num_rows_device, launch.num_rows, launch.row_begin) * num_heads * slices;
  const int step = kSplit ? 1 : kFoldWarps;
  for (int piece = blockIdx.x * step + (kSplit ? 0 : warp); piece < num_pieces; piece += gridDim.x * step) {
    const int64_t query = piece / slices, leaf_stride = launch.num_rows * num_heads * launch.pitch;
    const int column = piece % slices * kFoldColumns + lane * 4, num_leaves = launch.num_leaves[query / num_heads];
    const float2* stats = launch.stats + query * launch.max_leaves;
    const QueryTotal total = total_of(stats, num_leaves, lane);
    float4 acc[kSplit ? 1 : kFoldSums];
#pragma unroll
    for (auto& sum : acc) sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (column < latent)
      add_leaves<kSplit>(acc, launch.partials + query * launch.pitch + column, leaf_stride, stats, num_leaves,
                         kSplit ? warp : 0, total.largest);
    if constexpr (kSplit) {
      partial[warp][lane] = acc[0];
      __syncthreads();
      for (int j = 1; j < kFoldSums && warp == 0; ++j) add_to(acc[0], partial[j][lane]);
      __syncthreads();
      if (warp > 0) continue;
    } else {
#pragma unroll
      for (int j = 1; j < kFoldSums; ++j) add_to(acc[0], acc[j]);
    }
    Float* out = static_cast<Float*>(a.out) + (launch.row_begin * num_heads + query) * latent + column;
    store_columns(out, latent - column, acc[0], num_leaves > 0 ? total.inverse_sum : NAN);
  }
}

// --- host ----------------------------------------------------------------------------------------------------------

using LargeShape = MmaShape<512, 64, 32, 5, true>;   // DeepSeek and Kimi, where a block may have 227 KB
using SmallShape = MmaShape<512, 64, 16, 4, false>;  // the same dimensions elsewhere
using TinyShape = MmaShape<64, 16, 32, 5, true>;
static_assert(LargeShape::kSharedBytes <= 227 * 1024 && SmallShape::kSharedBytes <= kMaxSharedBytes &&
              TinyShape::kSharedBytes <= kMaxSharedBytes);
[[maybe_unused]] constexpr AttnCosts kMmaCosts{{0.038f, 0.054f, 0.062f}, {0.4f, 0.8f, 1.5f}, {3.0f, 4.5f, 5.5f}, 4, 6};
// A test may set these, to see that they do not touch the bits.
#ifndef KDTREE_ATTN_COSTS
#define KDTREE_ATTN_COSTS kMmaCosts
#define KDTREE_ATTN_MAX_BLOCKS (1 << 30)
#define KDTREE_ATTN_MAX_SHARED_BYTES (1 << 30)
#endif
constexpr AttnCosts kSimtCosts{{0.05f, 0.05f, 0.05f}, {2, 2, 2}, {3, 3, 3}, kSimtLog2Queries, kSimtLog2Queries};

struct Device {
  int num_multiprocessors = 0, max_shared_bytes = 0;
};

int find_device(Device& device) {
  int id = 0;
  if (cudaGetDevice(&id) != cudaSuccess) return kCudaError;
  if (cudaDeviceGetAttribute(&device.num_multiprocessors, cudaDevAttrMultiProcessorCount, id) != cudaSuccess)
    return kCudaError;
  if (cudaDeviceGetAttribute(&device.max_shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, id) != cudaSuccess)
    return kCudaError;
  if (device.num_multiprocessors > KDTREE_ATTN_MAX_BLOCKS) device.num_multiprocessors = KDTREE_ATTN_MAX_BLOCKS;
  if (device.max_shared_bytes > KDTREE_ATTN_MAX_SHARED_BYTES) device.max_shared_bytes = KDTREE_ATTN_MAX_SHARED_BYTES;
  return kOk;
}

int64_t align256(int64_t bytes) { return (bytes + 255) / 256 * 256; }

int64_t max_leaves(const VerifyAttnArgs& a) { return leaf_of(int(a.num_slots)) + 1; }

// Lays the workspace of `num_rows` rows out from `base`; the bytes it takes.
int64_t lay_out(AttnLaunch& launch, const VerifyAttnArgs& a, int64_t num_rows, char* base) {
  launch.a = a;
  launch.num_rows = num_rows;
  launch.max_leaves = max_leaves(a);
  launch.pitch = (a.latent_dim + 3) / 4 * 4;
  const int64_t num_queries = num_rows * a.num_heads, num_leaves = num_queries * launch.max_leaves;
  int64_t bytes = 256;
  launch.tickets = reinterpret_cast<uint64_t*>(base);
  launch.num_leaves = reinterpret_cast<int32_t*>(base + bytes);
  bytes += align256(num_rows * int64_t(sizeof(int32_t)));
  launch.stats = reinterpret_cast<float2*>(base + bytes);
  bytes += align256(num_leaves * int64_t(sizeof(float2)));
  launch.partials = reinterpret_cast<float*>(base + bytes);
  return bytes + align256(num_leaves * launch.pitch * int64_t(sizeof(float)));
}

template <class Float>
int launch_fold(const AttnLaunch& launch_args, const Device& device, void* stream) {
  const int64_t slices = ceil_div(launch_args.a.latent_dim, kFoldColumns);
  const int64_t num_queries = launch_args.num_rows * launch_args.a.num_heads, most = device.num_multiprocessors * 8;
  const auto shape = [&](int64_t blocks) {
    return LaunchShape{dim3(blocks < most ? blocks : most), dim3(kFoldThreads), 0, 1, true};
  };
  if (num_queries < kManyQueries)
    return launch(attn_fold_kernel<Float, true>, shape(num_queries * slices), stream, launch_args);
  return launch(attn_fold_kernel<Float, false>, shape(ceil_div(num_queries * slices, kFoldWarps)), stream, launch_args);
}

int launch_leaves(const AttnLaunch& launch_args, const Device& device, void* stream) {
  const VerifyAttnArgs& a = launch_args.a;
  const auto run = [&](auto kernel, int threads, int shared_bytes, const AttnCosts& costs) {
    const LaunchShape shape{dim3(device.num_multiprocessors), dim3(threads), size_t(shared_bytes), 1, true};
    return launch(kernel, shape, stream, launch_args, costs);
  };
  const bool aligned = (reinterpret_cast<uintptr_t>(a.cache) | reinterpret_cast<uintptr_t>(a.q_latent) |
                        reinterpret_cast<uintptr_t>(a.q_rope)) % 16 == 0;
  if (a.dtype == kBF16 && a.latent_dim == 512 && a.rope_dim == 64) {
    if (!aligned) return kUnsupported;
    if (device.max_shared_bytes >= LargeShape::kSharedBytes)
      return run(attn_mma_kernel<LargeShape>, kMmaThreads, LargeShape::kSharedBytes, KDTREE_ATTN_COSTS);
    return run(attn_mma_kernel<SmallShape>, kMmaThreads, SmallShape::kSharedBytes, KDTREE_ATTN_COSTS);
  }
  if (a.dtype == kBF16 && a.latent_dim == 64 && a.rope_dim == 16)
    return aligned ? run(attn_mma_kernel<TinyShape>, kMmaThreads, TinyShape::kSharedBytes, KDTREE_ATTN_COSTS)
                   : int(kUnsupported);
  return with_dtype(a.dtype, [&](auto element) {
    using Float = decltype(element);
    const int64_t width = a.latent_dim + a.rope_dim;
    if (width <= 4 * kWarp) return run(attn_simt_kernel<Float, 4>, kSimtThreads, 0, kSimtCosts);
    if (width <= 18 * kWarp) return run(attn_simt_kernel<Float, 18>, kSimtThreads, 0, kSimtCosts);
    return int(kUnsupported);
  });
}

}  // namespace

int64_t verify_attn_cuda_workspace_bytes(const VerifyAttnArgs& a) {
  AttnLaunch launch_args;
  return lay_out(launch_args, a, a.num_rows, nullptr);
}

int verify_attn_cuda(const VerifyAttnArgs& a, void* stream) {
  if (a.num_streams > kMaxAttnStreams || a.num_tree_slots > kMaxPath) return kUnsupported;
  if (a.num_slots > int64_t{1} << 30) return kUnsupported;
  if (a.num_rows == 0 || a.num_heads == 0) return kOk;
  Device device;
  if (const int status = find_device(device)) return status;
  AttnLaunch launch_args;
  int64_t rows = a.num_rows;
  while (rows > 1 && lay_out(launch_args, a, rows, nullptr) > a.workspace_bytes) rows -= ceil_div(rows, 16);
  if (lay_out(launch_args, a, rows, static_cast<char*>(a.workspace)) > a.workspace_bytes) return kOutOfRange;
  if (rows * a.num_heads * ceil_div(a.latent_dim, kFoldColumns) > int64_t{1} << 30) return kUnsupported;
  launch_args.scale_log2 = float(double(a.scale) * 1.4426950408889634);
  for (int64_t begin = 0; begin < a.num_rows; begin += rows) {
    launch_args.row_begin = begin;
    launch_args.num_rows = rows < a.num_rows - begin ? rows : a.num_rows - begin;
    if (const int status = launch_leaves(launch_args, device, stream)) return status;
    const int status = with_dtype(
        a.dtype, [&](auto element) { return launch_fold<decltype(element)>(launch_args, device, stream); });
    if (status) return status;
  }
  return kOk;
}

}  // namespace kdtree
