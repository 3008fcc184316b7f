// One block tile of out = W x, for linear.cu and moe_experts.cu: packed weights, any number of rows, one order of additions.
//
// A sum runs over K in units of 32, cut into 8 segments (segments.h). Inside a segment: F32, one fma chain in k order; BF16,
// a chain of mma.m16n8k16 in the packed order, W as A and x as B. The 8 segment sums are combined on a fixed tree. Which warp
// or block owns which segment, how many outputs and rows a tile has, and how deep the pipeline is, never touch the bits.
//
// Two producer warps fill a ring of stages: weights by bulk copies (they are contiguous), x by 16-byte copies. The others
// only wait for a full stage, compute and release it, so they drift apart and shared-memory reads overlap tensor work.
#pragma once
#include "linear_consumer.cuh"
#include "linear_producer.cuh"

namespace kdtree {

// --- results ---------------------------------------------------------------------------------------------------------

// Calls f(output in block, row in block, value) for every sum of this lane.
template <class S, class F>
__device__ __forceinline__ void each_sum(Accumulator<S>& acc, F&& f) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int row_warp = warp % S::kRowWarps, out_warp = warp / S::kRowWarps % S::kOutWarps;
  acc.each([&](int r, int j, int e, float v) {
    f((out_warp * S::kOutTiles + r) * kOutTile + acc.out(lane, e), (row_warp * S::kRowTiles + j) * kRowTile + acc.row(lane, e), v);
  });
}

template <class S>
__device__ void store_partials(const TileArgs& a, const Tile<S>& tile, Accumulator<S>& acc) {
  const int segment = tile.rank * S::kSegWarps + threadIdx.x / kWarp / (S::kRowWarps * S::kOutWarps);
  each_sum<S>(acc, [&](int n, int m, float v) {
    const int out = tile.first_out_tile * kOutTile + n;
    if (m < tile.num_rows && out < a.num_out)
      static_cast<float*>(a.out)[(static_cast<int64_t>(tile.out_row(m)) * kNumSegments + segment) * a.num_out + out] = v;
  });
}

// Rounds once, adds the residual with its own rounding, and writes 1 or 4 neighbouring outputs.
template <class T, class Out, int kWidth>
__device__ __forceinline__ void store_outputs(const TileArgs& a, int64_t at, const float (&sum)[4]) {
  struct alignas(kWidth * sizeof(Out)) Vector { Out value[kWidth]; } result, added;
  if (a.residual != nullptr) added = *reinterpret_cast<const Vector*>(static_cast<const Out*>(a.residual) + at);
#pragma unroll
  for (int e = 0; e < kWidth; ++e) {
    result.value[e] = from_float<Out>(sum[e]);
    if (a.residual != nullptr) result.value[e] = from_float<Out>(to_float(result.value[e]) + to_float(added.value[e]));
  }
  *reinterpret_cast<Vector*>(static_cast<Out*>(a.out) + at) = result;
}

template <class T, class Out>
__device__ __forceinline__ void store_four(const TileArgs& a, int64_t at, int num_out, const float (&sum)[4]) {
  if (a.out_aligned && num_out >= 4) return store_outputs<T, Out, 4>(a, at, sum);
#pragma unroll
  for (int e = 0; e < 4; ++e)
    if (e < num_out) {
      const float one[4] = {sum[e], 0.f, 0.f, 0.f};
      store_outputs<T, Out, 1>(a, at + e, one);
    }
}

// Combines the segment sums that all blocks of the cluster hold in shared memory at `sums`. Each block takes a share.
template <class S>
__device__ void combine(const TileArgs& a, const Tile<S>& tile, uint32_t sums) {
  constexpr int kQuads = S::kBlockOut / 4, kSums = S::kSegWarps * S::kCluster;
  for (int n = tile.rank * S::kThreads + threadIdx.x; n < tile.num_rows * kQuads; n += S::kCluster * S::kThreads) {
    const int m = n / kQuads, first = n % kQuads * 4, out = tile.first_out_tile * kOutTile + first;
    if (out >= a.num_out) continue;
    float4 v[kSums];
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
      const uint32_t from = sums + ((s % S::kSegWarps * S::kBlockRows + m) * S::kSumStride + first) * 4;
      if constexpr (S::kCluster > 1) {
        v[s] = load_cluster(from, s / S::kSegWarps);
      } else {
        const uint4 u = load_shared(from);
        v[s] = {__uint_as_float(u.x), __uint_as_float(u.y), __uint_as_float(u.z), __uint_as_float(u.w)};
      }
    }
#pragma unroll
    for (int width = 1; width < kSums; width *= 2)
#pragma unroll
      for (int s = 0; s < kSums; s += 2 * width)
        v[s] = {v[s].x + v[s + width].x, v[s].y + v[s + width].y, v[s].z + v[s + width].z, v[s].w + v[s + width].w};
    const float sum[4] = {v[0].x, v[0].y, v[0].z, v[0].w};
    const int64_t at = tile.out_row(m) * a.out_row_stride + (tile.rows ? 0 : tile.group * a.out_group_stride) + out;
    if (a.out_f32) store_four<typename S::T, float>(a, at, a.num_out - out, sum);
    else store_four<typename S::T, typename S::T>(a, at, a.num_out - out, sum);
  }
}

// --- kernel ----------------------------------------------------------------------------------------------------------

template <class S>
__global__ void __launch_bounds__(S::kThreads, S::kMinBlocks) linear_tile_kernel(const __grid_constant__ TileArgs a) {
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32_t full = shared_address(shared), empty = full + S::kMaxStages * 8, stages = full + S::kBarrierBytes;
  const int warp = threadIdx.x / kWarp;
  Tile<S> tile(a);
  const bool early = a.weights_settled && a.items == nullptr && tile.row_tile == 0;
  if (!early) {
    wait_for_previous_kernel();
    tile.find_rows(a);
    if (tile.num_rows == 0) return;
  }
  if (threadIdx.x == 0) {
    for (int s = 0; s < S::kStages; ++s) {
      barrier_init(full + s * 8, kWarp + S::kSegWarps * S::kBlockTiles);
      barrier_init(empty + s * 8, S::kConsumers);
    }
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  if (warp == S::kConsumers) {
    produce_weights<S>(a, tile, full, empty, stages);
  } else if (warp == S::kConsumers + 1) {
    produce_x<S>(a, tile, early, full, empty, stages);
  } else {
    Accumulator<S> acc;
    consume<S>(tile, acc, full, empty, stages);
    if constexpr (S::kPartials) {
      if (early) wait_for_previous_kernel(), tile.find_rows(a);
      return store_partials<S>(a, tile, acc);
    }
    asm volatile("bar.sync 1, %0;" ::"n"(S::kConsumers * kWarp) : "memory");  // every stage has been read
    float* sums = reinterpret_cast<float*>(shared + S::kBarrierBytes) +
                  warp / (S::kRowWarps * S::kOutWarps) * S::kBlockRows * S::kSumStride;
    each_sum<S>(acc, [&](int n, int m, float v) { sums[m * S::kSumStride + n] = v; });
  }
  if constexpr (S::kPartials) return;
  if constexpr (S::kCluster > 1) cluster_sync();
  else __syncthreads();
  if (early) wait_for_previous_kernel(), tile.find_rows(a);
  combine<S>(a, tile, stages);
  if constexpr (S::kCluster > 1) cluster_sync();  // nobody leaves while a neighbour reads its sums
}

// num_row_tiles is the number of items, or 0: as many as the rows need.
template <class S>
int launch_tile(TileArgs a, int num_groups, void* stream) {
  if (a.num_row_tiles == 0) a.num_row_tiles = static_cast<int>(ceil_div(a.num_rows, S::kBlockRows));
  const int64_t num_blocks = ceil_div(a.num_out, S::kBlockOut) * a.num_row_tiles * S::kCluster;
  if (num_blocks > INT32_MAX || num_groups > 65535) return kUnsupported;
  if (num_blocks == 0 || num_groups == 0) return kOk;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(num_blocks), num_groups);
  shape.block = dim3(S::kThreads);
  shape.shared_bytes = S::kSharedBytes;
  shape.cluster = S::kPartials ? 1 : S::kCluster;
  shape.early = true;
  return launch(linear_tile_kernel<S>, shape, stream, a);
}

}  // namespace kdtree
