// One block tile of out = W x, for linear.cu and moe_experts.cu: packed weights, any number of rows, one order of additions.
//
// A sum runs over K in units of 32, cut into 8 segments (segments.h). Inside a segment: F32, one fma chain in k order; BF16,
// a chain of mma.m16n8k16 in the packed order, W as A and x as B. The 8 segment sums are combined on a fixed tree. Which warp
// or block owns which segment, how many outputs and rows a tile has, and how deep the pipeline is, never touch the bits.
//
// Two producer warps fill a ring of stages: weights by bulk copies (they are contiguous), x by 16-byte copies. The others
// only wait for a full stage, compute and release it, so they drift apart and shared-memory reads overlap tensor work.
#pragma once
#include "linear_consumer_wgmma.cuh"
#include "linear_producer.cuh"
#include "swiglu.cuh"

namespace kdtree {

// --- results ---------------------------------------------------------------------------------------------------------

template <class S>
__device__ void store_partials(const TileArgs& a, const Tile<S>& tile, Accumulator<S>& acc) {
  const WarpPlace<S> at;
  const int lane = threadIdx.x % kWarp, segment = tile.segment(at.segment, 0);
  if (!tile.mine(at.segment, 0)) return;
  acc.each([&](int r, int j, int e, float v) {
    const int out = (tile.first_out_tile + at.out_tile + r) * kOutTile + acc.out(lane, e);
    const int m = (at.row_tile + j) * kRowTile + acc.row(lane, e);
    if (m < tile.num_rows && out < a.num_out)
      static_cast<float*>(a.out)[(static_cast<int64_t>(tile.out_row(m)) * kNumSegments + segment) * a.num_out + out] = v;
  });
}

// Rounds once, adds the residual with its own rounding, and writes kWidth neighbouring outputs.
template <class Out, int kWidth>
__device__ __forceinline__ void store_outputs(const TileArgs& a, int64_t at, const float* sum) {
  struct alignas(kWidth * sizeof(Out)) Vector { Out value[kWidth]; } result, added = {};
  if (a.residual != nullptr) added = *reinterpret_cast<const Vector*>(static_cast<const Out*>(a.residual) + at);
#pragma unroll
  for (int e = 0; e < kWidth; ++e) {
    result.value[e] = from_float<Out>(sum[e]);
    if (a.residual != nullptr) result.value[e] = from_float<Out>(to_float(result.value[e]) + to_float(added.value[e]));
  }
  *reinterpret_cast<Vector*>(static_cast<Out*>(a.out) + at) = result;
}

template <class Out>
__device__ __forceinline__ void store_four(const TileArgs& a, int64_t at, int num_out, const float (&sum)[4]) {
  if (a.out_aligned && num_out >= 4) return store_outputs<Out, 4>(a, at, sum);
#pragma unroll
  for (int e = 0; e < 4; ++e)
    if (e < num_out) store_outputs<Out, 1>(a, at + e, sum + e);
}

// Four lanes, kStep apart, swap values: element e of the q-th becomes element q of the e-th.
template <int kStep, class T>
__device__ __forceinline__ void transpose_quad(T (&v)[4], int lane) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if ((e & bit) == 0) {
        const bool high = lane / kStep & bit;
        const T got = __shfl_xor_sync(0xffffffffu, high ? v[e] : v[e | bit], kStep * bit);
        (high ? v[e] : v[e | bit]) = got;
      }
}

// Writes the 16 outputs x 8 rows of fragment f, whose sums lie as an accumulator's.
template <class S>
__device__ __forceinline__ void store_fragment(const TileArgs& a, const Tile<S>& tile, int f, float (&v)[4]) {
  using T = typename S::T;
  constexpr int kRowTilesOfBlock = S::kBlockRows / kRowTile;
  const int lane = threadIdx.x % kWarp;
  int n = lane % 4 * 4, m = lane / 4;
  if constexpr (sizeof(T) == 2) {
    transpose_quad<4>(v, lane);  // each holds four neighbouring outputs of one row
    const int q = lane / 4 % 4;
    n = lane / 16 * 4 + q / 2 * 8, m = lane % 4 * 2 + q % 2;
  }
  n += (tile.first_out_tile + f / kRowTilesOfBlock) * kOutTile, m += f % kRowTilesOfBlock * kRowTile;
  const int num_out = a.num_out / S::kRuns;
  if (m >= tile.num_rows || n >= num_out) return;
  const int64_t at = tile.out_row(m) * a.out_row_stride + (tile.rows ? 0 : tile.group * a.out_group_stride) + n;
  if (a.out_f32) store_four<float>(a, at, num_out - n, v);
  else store_four<T>(a, at, num_out - n, v);
}

// Calls f(fragment, sums) for every fragment of a consumer warp.
template <class S, class F>
__device__ __forceinline__ void each_fragment(Accumulator<S>& acc, F&& f) {
  const WarpPlace<S> at;
#pragma unroll
  for (int r = 0; r < S::kOutTiles; ++r)
#pragma unroll
    for (int j = 0; j < S::kRowTiles; ++j)
      f((at.out_tile + r) * (S::kBlockRows / kRowTile) + at.row_tile + j, acc.value[r][j]);
}

// Fragment f of a run is combined and written by block f % kCluster: hands it this warp's segment sum.
template <class S>
__device__ void send_sums(const Tile<S>& tile, Accumulator<S>& acc, uint32_t sums, uint32_t arrived) {
  const int segment = tile.rank * S::kSegWarps + WarpPlace<S>().segment, lane = threadIdx.x % kWarp;
  each_fragment(acc, [&](int f, float (&v)[4]) {
    const int run = S::kRuns == 1 ? 0 : f / S::kFragments, in_run = f - run * S::kFragments, rank = in_run % S::kCluster;
    const uint32_t to = sums + (((run * S::kShare + in_run / S::kCluster) * S::kSums + segment) * kWarp + lane) * 16;
    if constexpr (S::kCluster == 1) store_shared(to, v);
    else store_async(address_in_block(to, rank), v, address_in_block(arrived, rank));
  });
}

// The sums of the i-th fragment that meets here, added on the tree.
template <class S>
__device__ __forceinline__ void add_sums(uint32_t sums, int i, int lane, float (&sum)[4]) {
  float v[S::kSums][4];
#pragma unroll
  for (int s = 0; s < S::kSums; ++s) as_floats(load_shared(sums + ((i * S::kSums + s) * kWarp + lane) * 16), v[s]);
#pragma unroll
  for (int width = 1; width < S::kSums; width *= 2)
#pragma unroll
    for (int s = 0; s < S::kSums; s += 2 * width)
#pragma unroll
      for (int e = 0; e < 4; ++e) v[s][e] += v[s + width][e];
#pragma unroll
  for (int e = 0; e < 4; ++e) sum[e] = v[0][e];
}

template <class S>
__device__ void combine(const TileArgs& a, const Tile<S>& tile, uint32_t sums) {
  using T = typename S::T;
  const int lane = threadIdx.x % kWarp;
  for (int i = threadIdx.x / kWarp; i * S::kCluster + tile.rank < S::kFragments; i += S::kThreads / kWarp) {
    float sum[4];
    add_sums<S>(sums, i, lane, sum);
    if constexpr (S::kSwiglu) {
      float up[4];
      add_sums<S>(sums, S::kShare + i, lane, up);
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[e] = swiglu_of(to_float(from_float<T>(sum[e])), to_float(from_float<T>(up[e])));
    }
    store_fragment<S>(a, tile, i * S::kCluster + tile.rank, sum);
  }
}

// --- kernel ----------------------------------------------------------------------------------------------------------

// What block `block` of a product does, in `shared`, S::kSharedBytes aligned to 128, by its first S::kThreads threads. The
// blocks of a cluster do neighbouring tiles of one product, or of one whose S::kCluster is 1.
template <class S>
__device__ __forceinline__ void do_tile(const TileArgs& a, int block, unsigned char* shared) {
#ifndef __CUDA_ARCH_FEAT_SM90_ALL
  if constexpr (S::kHopper) return;  // never launched there
#endif
  const uint32_t first = shared_address(shared), full = S::kWgmma ? (first + S::kAlign - 1) / S::kAlign * S::kAlign : first;
  const uint32_t empty = full + S::kMaxStages * 8, arrived = empty + S::kMaxStages * 8;
  const uint32_t stages = full + S::kBarrierBytes;
  const int warp = threadIdx.x / kWarp;
  Tile<S> tile(a, block);
  if (threadIdx.x == 0) {
    for (int s = 0; s < S::kStages; ++s) {
      barrier_init(full + s * 8, kWarp + 1);  // the lanes of the x warp and the one that copies weights
      barrier_init(empty + s * 8, S::kConsumers);
    }
    barrier_init(arrived, 1);
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
    const int num_fragments = (S::kFragments - tile.rank + S::kCluster - 1) / S::kCluster;  // that this block combines
    barrier_arrive_expect(arrived, S::kSumBytes == 0 ? 0 : S::kRuns * num_fragments * S::kFragmentBytes);
  }
  const bool early = a.weights_settled && !a.of_experts() && tile.row_tile == 0;
  if (a.allow_at_once) allow_next_kernel();
  if (!early) {
    if (a.prefetch_weights && !a.of_experts() && tile.row_tile == 0 && warp == S::kConsumers) prefetch_weights<S>(a, tile);
    wait_for_previous_kernel();
    if constexpr (S::kListBytes > 0) {
      if (a.pair_expert != nullptr) tile.find_pairs(a, reinterpret_cast<int32_t*>(shared + (arrived + 16 - first)));
      else tile.find_rows(a);
    } else {
      tile.find_rows(a);
    }
    if (tile.num_rows == 0) return;
  }
  __syncthreads();

  Accumulator<S> acc;
  if (warp == S::kConsumers) produce_weights<S>(a, tile, full, empty, stages);
  else if (warp == S::kConsumers + 1) produce_x<S>(a, tile, early, full, empty, stages);
  else if constexpr (S::kWgmma) consume_wgmma<S>(tile, acc, full, empty, stages);
  else consume<S>(tile, acc, full, empty, stages);

  if (early) wait_for_previous_kernel(), tile.find_rows(a);
  const bool has_sums = warp < S::kConsumers;
  if constexpr (S::kPartials) {
    if (has_sums) store_partials<S>(a, tile, acc);
  } else if constexpr (S::kSums == 1) {
    if (has_sums) each_fragment(acc, [&](int f, float (&v)[4]) { store_fragment<S>(a, tile, f, v); });
  } else {
    if constexpr (S::kCluster > 1) cluster_meet();  // the stages of all blocks have been read
    else __syncthreads();
    if (has_sums) send_sums<S>(tile, acc, stages, arrived);
    if constexpr (S::kCluster > 1) barrier_wait(arrived, 0);
    else __syncthreads();
    combine<S>(a, tile, stages);
  }
}

template <class S>
__global__ void __launch_bounds__(S::kThreads, S::kMinBlocks) linear_tile_kernel(const __grid_constant__ TileArgs a) {
  extern __shared__ __align__(128) unsigned char shared[];
  do_tile<S>(a, blockIdx.x, shared);
}

// num_row_tiles is the number of items, or 0: as many as the rows need.
template <class S>
int64_t count_blocks(TileArgs* a) {
  if (a->num_row_tiles == 0) a->num_row_tiles = static_cast<int>(ceil_div(a->num_rows, S::kBlockRows));
  const int first_rank = S::kPartials ? a->first_segment / S::kSegWarps : 0;
  const int end_rank = S::kPartials ? (a->end_segment + S::kSegWarps - 1) / S::kSegWarps : S::kCluster;
  a->first_rank = first_rank, a->num_ranks = end_rank - first_rank;
  return ceil_div(a->num_out, S::kBlockOut) * a->num_row_tiles * a->num_ranks;
}

// Launches the blocks of shape S.
template <class S>
int launch_blocks(void (*kernel)(TileArgs), TileArgs a, int num_groups, void* stream) {
  const int64_t num_blocks = count_blocks<S>(&a);
  if (num_blocks > INT32_MAX || num_groups > 65535) return kUnsupported;
  if (num_blocks == 0 || num_groups == 0) return kOk;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(num_blocks), num_groups);
  shape.block = dim3(S::kThreads);
  shape.shared_bytes = S::kSharedBytes;
  shape.cluster = S::kPartials ? 1 : S::kCluster;
  shape.start = Start::kEarly;
  return launch(kernel, shape, stream, a);
}

template <class S>
int launch_tile(TileArgs a, int num_groups, void* stream) {
  return launch_blocks<S>(linear_tile_kernel<S>, a, num_groups, stream);
}

}  // namespace kdtree
