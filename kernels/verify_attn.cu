// verify_attn: attention of tree nodes over the latent cache, split over the keys. First every leaf of every query
// (attn_leaves.h) becomes a partial result (maximum, sum, weighted latents) in the workspace; then `fold` adds the
// leaves of a query in a fixed order of their index. Both read prefix lengths and row counts on the device.
#include "verify_attn_fold.cuh"
#include "verify_attn_mma.cuh"
#include "verify_attn_simt.cuh"
#include "verify_attn_wgmma.cuh"

namespace kdtree {
namespace {

// --- host ----------------------------------------------------------------------------------------------------------

using KimiShape = MmaShape<512, 64, 16, 4>;  // DeepSeek and Kimi, but for Hopper
using NanoShape = MmaShape<96, 16, 32, 5>;
using TinyShape = MmaShape<64, 16, 32, 5>;
static_assert(KimiShape::kSharedBytes <= kMaxSharedBytes && NanoShape::kSharedBytes <= kMaxSharedBytes &&
              TinyShape::kSharedBytes <= kMaxSharedBytes);
// A test may replace it, to see that it does not touch the bits.
#ifndef KDTREE_ATTN_TUNING
#define KDTREE_ATTN_TUNING kAttnTuning
#endif

struct Device {
  int num_multiprocessors = 0;
  bool is_hopper = false;
};

int find_device(Device& device) {
  int id = 0, major = 0;
  if (cudaGetDevice(&id) != cudaSuccess) return kCudaError;
  if (cudaDeviceGetAttribute(&device.num_multiprocessors, cudaDevAttrMultiProcessorCount, id) != cudaSuccess)
    return kCudaError;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, id) != cudaSuccess) return kCudaError;
  device.is_hopper = major == 9 && KDTREE_ATTN_TUNING.uses_wgmma;
  if (device.num_multiprocessors > KDTREE_ATTN_TUNING.max_blocks)
    device.num_multiprocessors = KDTREE_ATTN_TUNING.max_blocks;
  return kOk;
}

int64_t align256(int64_t bytes) { return (bytes + 255) / 256 * 256; }

int64_t max_leaves(const VerifyAttnArgs& a) { return leaf_of(int(a.num_slots)) + 1; }

// Lays the workspace of `num_rows` rows out from `base`; the bytes it takes.
int64_t lay_out(AttnLaunch& launch, const VerifyAttnArgs& a, int64_t num_rows, char* base) {
  launch.a = a;
  launch.num_rows = num_rows;
  launch.num_queries = num_rows * a.num_heads;
  launch.max_leaves = max_leaves(a);
  launch.pitch = (a.latent_dim + 3) / 4 * 4;
  const int64_t num_leaves = launch.num_queries * launch.max_leaves;
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
  const int64_t pieces = launch_args.num_queries * ceil_div(launch_args.a.latent_dim, kFoldColumns);
  const int64_t most = device.num_multiprocessors * kFoldBlocks;
  const LaunchShape shape{dim3(pieces < most ? pieces : most), dim3(kFoldThreads), 0, 1, Start::kEarly};
  return launch(attn_fold_kernel<Float>, shape, stream, launch_args);
}

int launch_wgmma(const AttnLaunch& launch_args, const LaunchShape& shape, void* stream) {
  const VerifyAttnArgs& a = launch_args.a;
  const int64_t num_keys = a.num_streams * a.num_slots, num_queries = a.num_rows * a.num_heads;
  if (num_keys > INT32_MAX || num_queries > INT32_MAX) return kUnsupported;
  AttnMaps maps;
  if (const int status = map_tiles(maps.keys, a.cache, num_keys, kWgmmaLatent + kWgmmaRope, kPartBoxes)) return status;
  if (const int status = map_tiles(maps.q_latent, a.q_latent, num_queries, kWgmmaLatent, kWgmmaBoxes - 1)) return status;
  if (const int status = map_tiles(maps.q_rope, a.q_rope, num_queries, kWgmmaRope, 1)) return status;
  return launch(attn_wgmma_kernel, shape, stream, launch_args, KDTREE_ATTN_TUNING.wgmma, maps);
}

int launch_leaves(const AttnLaunch& launch_args, const Device& device, void* stream) {
  const VerifyAttnArgs& a = launch_args.a;
  const auto shape = [&](int threads, int shared_bytes) {
    return LaunchShape{dim3(device.num_multiprocessors), dim3(threads), size_t(shared_bytes), 1, Start::kEarly};
  };
  const bool aligned = (reinterpret_cast<uintptr_t>(a.cache) | reinterpret_cast<uintptr_t>(a.q_latent) |
                        reinterpret_cast<uintptr_t>(a.q_rope)) % 16 == 0;
  const auto is_bf16 = [&](int latent, int rope) {
    return a.dtype == kBF16 && a.latent_dim == latent && a.rope_dim == rope;
  };
  const bool is_kimi = is_bf16(512, 64), is_nano = is_bf16(96, 16), is_tiny = is_bf16(64, 16);
  if ((is_kimi || is_nano || is_tiny) && !aligned) return kUnsupported;
  const auto launch_mma = [&](auto mma) {
    using S = decltype(mma);
    return launch(attn_mma_kernel<S>, shape(kMmaThreads, S::kSharedBytes), stream, launch_args, KDTREE_ATTN_TUNING.mma);
  };
  if (is_kimi && device.is_hopper) return launch_wgmma(launch_args, shape(kWgmmaThreads, kWgmmaSharedBytes), stream);
  if (is_kimi) return launch_mma(KimiShape());
  if (is_nano) return launch_mma(NanoShape());
  if (is_tiny) return launch_mma(TinyShape());
  return with_dtype(a.dtype, [&](auto element) {
    using Float = decltype(element);
    const int64_t width = a.latent_dim + a.rope_dim;
    const LaunchShape simt = shape(kSimtThreads, 0);
    if (width <= 4 * kWarp) return launch(attn_simt_kernel<Float, 4>, simt, stream, launch_args, kSimtCosts);
    if (width <= 18 * kWarp) return launch(attn_simt_kernel<Float, 18>, simt, stream, launch_args, kSimtCosts);
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
    launch_args.query_begin = begin * a.num_heads;
    launch_args.num_rows = rows < a.num_rows - begin ? rows : a.num_rows - begin;
    launch_args.num_queries = launch_args.num_rows * a.num_heads;
    if (const int status = launch_leaves(launch_args, device, stream)) return status;
    const int status = with_dtype(
        a.dtype, [&](auto element) { return launch_fold<decltype(element)>(launch_args, device, stream); });
    if (status) return status;
  }
  return kOk;
}

}  // namespace kdtree
