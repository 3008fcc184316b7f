// verify_attn: attention of tree nodes over the latent cache, split over the keys. First every leaf of every query, or every
// group of leaves (attn_leaves.h), becomes a partial result (maximum, sum, weighted latents) in the workspace; then `fold`
// folds the leaves of a group and adds the groups of a query in a fixed order. Both read prefix lengths and row counts on the device.
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
__device__ __forceinline__ void scale_by(float4& acc, float factor) {
  acc.x = __fmul_rn(acc.x, factor);
  acc.y = __fmul_rn(acc.y, factor);
  acc.z = __fmul_rn(acc.z, factor);
  acc.w = __fmul_rn(acc.w, factor);
}
__device__ __forceinline__ void add_to(float4& acc, const float4& x) {
  acc.x = __fadd_rn(acc.x, x.x);
  acc.y = __fadd_rn(acc.y, x.y);
  acc.z = __fadd_rn(acc.z, x.z);
  acc.w = __fadd_rn(acc.w, x.w);
}

// Walks the partial results of a row in order of position: those of its groups first, first + step, …
struct SlotWalk {
  int num_groups, num_leaves, folded_leaves, step;
  int group, leaf = 0, group_begin = 0, group_end = 0;

  __device__ SlotWalk(const AttnRow& row, int first, int step)
      : num_groups(row.num_keys > 0 ? ((row.num_keys - 1) >> kLog2Group) + 1 : 0),
        num_leaves(row.num_keys > 0 ? leaf_of(row.num_keys - 1) + 1 : 0),
        folded_leaves(row.folded_leaves),
        step(step),
        group(first) {
    if (exists()) enter_group();
  }

  __device__ bool exists() const { return group < num_groups; }
  __device__ bool starts_group() const { return leaf == group_begin; }
  __device__ bool ends_group() const { return next_leaf() >= group_end; }
  __device__ int next_leaf() const { return leaf + 1 < folded_leaves ? min(folded_leaves, group_end) : leaf + 1; }

  __device__ void advance() {
    if (!ends_group()) {
      leaf = next_leaf();
    } else {
      group += step;
      if (exists()) enter_group();
    }
  }

  __device__ void enter_group() {
    leaf = group_begin = leaf_of(group << kLog2Group);
    group_end = min(leaf_of((group + 1) << kLog2Group), num_leaves);
  }
};

// Maximum over the leaves, and 1 / the sum over the groups (lanes take groups lane, lane + 32, …; then warp_sum).
struct QueryTotal {
  float largest, inverse_sum;
};

__device__ __forceinline__ QueryTotal total_of(const AttnRow& row, const float2* stats, int lane) {
  float largest = -INFINITY, sum = 0.0f;
  for (SlotWalk walk(row, lane, kWarp); walk.exists(); walk.advance()) largest = fmaxf(largest, stats[walk.leaf].x);
  largest = warp_max(largest);
  float group_max = 0.0f, group_sum = 0.0f;
  for (SlotWalk walk(row, lane, kWarp); walk.exists(); walk.advance()) {
    const float2 leaf = stats[walk.leaf];
    const float new_max = walk.starts_group() ? leaf.x : fmaxf(group_max, leaf.x);
    const float old_weight = exp2f(__fsub_rn(group_max, new_max)), weight = exp2f(__fsub_rn(leaf.x, new_max));
    group_sum = walk.starts_group() ? leaf.y : __fmaf_rn(weight, leaf.y, __fmul_rn(old_weight, group_sum));
    group_max = new_max;
    if (walk.ends_group()) sum = __fmaf_rn(exp2f(__fsub_rn(group_max, largest)), group_sum, sum);
  }
  return {largest, __fdiv_rn(1.0f, warp_sum(sum))};
}

template <class Float>
__device__ __forceinline__ void store_columns(Float* out, int count, const float4& acc, float scale) {
  const float v[4] = {__fmul_rn(acc.x, scale), __fmul_rn(acc.y, scale), __fmul_rn(acc.z, scale), __fmul_rn(acc.w, scale)};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (i < count) out[i] = from_float<Float>(v[i]);
}

// The sum over the walk's groups. Leaves of a group are folded first, as the tensor-core kernel folds them.
__device__ __forceinline__ float4 add_groups(SlotWalk walk, const float* from, int64_t leaf_stride, const float2* stats,
                                             float largest) {
  constexpr int kBatch = 8;
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f), folded = sum;
  float folded_max = 0.0f;
  while (walk.exists()) {
    float4 x[kBatch];
    float leaf_max[kBatch];
    SlotWalk loaded = walk;
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (loaded.exists()) {
        x[j] = __ldcs(reinterpret_cast<const float4*>(from + loaded.leaf * leaf_stride));
        leaf_max[j] = stats[loaded.leaf].x;
        loaded.advance();
      }
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (!walk.exists()) continue;
      if (walk.starts_group()) {
        folded = x[j];
        folded_max = leaf_max[j];
      } else {
        const float new_max = fmaxf(folded_max, leaf_max[j]), weight = exp2f(__fsub_rn(leaf_max[j], new_max));
        scale_by(folded, exp2f(__fsub_rn(folded_max, new_max)));
        add_weighted(folded, weight, x[j]);
        folded_max = new_max;
      }
      if (walk.ends_group()) add_weighted(sum, exp2f(__fsub_rn(folded_max, largest)), folded);
      walk.advance();
    }
  }
  return sum;
}

// A piece is 128 columns of a query. kSplit: a block takes a piece, warp j the groups j, j + 8, …; otherwise a warp takes a
// piece alone. The order of additions is the same: sum j over the groups j (mod 8), then the 8 sums in order.
template <class Float, bool kSplit>
__global__ void __launch_bounds__(kFoldThreads, 2) attn_fold_kernel(const __grid_constant__ AttnLaunch launch) {
  [[maybe_unused]] __shared__ float4 partial[kSplit ? kFoldSums : 1][kWarp];
  wait_for_previous_kernel();
  allow_next_kernel();
  const VerifyAttnArgs& a = launch.a;
  if (blockIdx.x == 0 && threadIdx.x == 0) *launch.tickets = 0;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int num_heads = int(a.num_heads), latent = int(a.latent_dim), slices = (latent + kFoldColumns - 1) / kFoldColumns;
  const int num_pieces = rows_in_use(a.num_rows_device, launch.num_rows, launch.row_begin) * num_heads * slices;
  const int step = kSplit ? 1 : kFoldWarps;
  for (int piece = blockIdx.x * step + (kSplit ? 0 : warp); piece < num_pieces; piece += gridDim.x * step) {
    const int64_t query = piece / slices, leaf_stride = launch.num_rows * num_heads * launch.pitch;
    const int column = piece % slices * kFoldColumns + lane * 4;
    const AttnRow row = launch.rows[query / num_heads];
    const float2* stats = launch.stats + query * launch.max_leaves;
    const QueryTotal total = total_of(row, stats, lane);
    const float* from = launch.partials + query * launch.pitch + min(column, latent - 1) / 4 * 4;
    const auto sum_of = [&](int j) {
      return add_groups(SlotWalk(row, j, kFoldSums), from, leaf_stride, stats, total.largest);
    };
    float4 sum;
    if constexpr (kSplit) {
      partial[warp][lane] = sum = sum_of(warp);
      __syncthreads();
      for (int j = 1; j < kFoldSums && warp == 0; ++j) add_to(sum, partial[j][lane]);
      __syncthreads();
      if (warp > 0) continue;
    } else {
      sum = sum_of(0);
#pragma unroll 1
      for (int j = 1; j < kFoldSums; ++j) add_to(sum, sum_of(j));
    }
    Float* out = static_cast<Float*>(a.out) + (launch.row_begin * num_heads + query) * latent + column;
    store_columns(out, latent - column, sum, row.num_keys > 0 ? total.inverse_sum : NAN);
  }
}

// --- host ----------------------------------------------------------------------------------------------------------

using LargeShape = MmaShape<512, 64, 32, 5, true>;   // DeepSeek and Kimi, where a block may have 227 KB of shared memory
using SmallShape = MmaShape<512, 64, 16, 4, false>;  // the same dimensions elsewhere
using TinyShape = MmaShape<64, 16, 32, 5, true>;
static_assert(LargeShape::kSharedBytes <= 227 * 1024 && SmallShape::kSharedBytes <= kMaxSharedBytes &&
              TinyShape::kSharedBytes <= kMaxSharedBytes);
[[maybe_unused]] constexpr AttnCosts kMmaCosts{{0.030f, 0.042f, 0.066f}, {0.5f, 0.7f, 1.3f}, {3.0f, 3.5f, 4.5f}, 4, 6, 5};
// A test may set these, to see that they do not touch the bits.
#ifndef KDTREE_ATTN_COSTS
#define KDTREE_ATTN_COSTS kMmaCosts
#define KDTREE_ATTN_MAX_BLOCKS (1 << 30)
#define KDTREE_ATTN_MAX_SHARED_BYTES (1 << 30)
#endif
constexpr AttnCosts kSimtCosts{{0.3f, 0.3f, 0.3f}, {1, 1, 1}, {3, 3, 3}, kSimtLog2Queries, kSimtLog2Queries, 0};

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
  launch.rows = reinterpret_cast<AttnRow*>(base + bytes);
  bytes += align256(num_rows * int64_t(sizeof(AttnRow)));
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
    return aligned ? run(attn_mma_kernel<TinyShape>, kMmaThreads, TinyShape::kSharedBytes, KDTREE_ATTN_COSTS) : kUnsupported;
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
  if (a.num_streams > kMaxAttnStreams || a.num_tree_slots > kMaxPath || a.num_slots > int64_t{1} << 30) return kUnsupported;
  if (a.num_rows == 0 || a.num_heads == 0) return kOk;
  Device device;
  if (const int status = find_device(device)) return status;
  AttnLaunch launch_args;
  int64_t rows = a.num_rows;
  while (rows > 1 && lay_out(launch_args, a, rows, nullptr) > a.workspace_bytes) rows = rows > 1 ? rows - ceil_div(rows, 16) : 1;
  if (lay_out(launch_args, a, rows, static_cast<char*>(a.workspace)) > a.workspace_bytes) return kOutOfRange;
  if (rows * a.num_heads * ceil_div(a.latent_dim, kFoldColumns) > int64_t{1} << 30) return kUnsupported;
  launch_args.scale_log2 = float(double(a.scale) * 1.4426950408889634);
  for (int64_t begin = 0; begin < a.num_rows; begin += rows) {
    launch_args.row_begin = begin;
    launch_args.num_rows = rows < a.num_rows - begin ? rows : a.num_rows - begin;
    if (const int status = launch_leaves(launch_args, device, stream)) return status;
    const int status = with_dtype(a.dtype, [&](auto e) { return launch_fold<decltype(e)>(launch_args, device, stream); });
    if (status) return status;
  }
  return kOk;
}

}  // namespace kdtree
