// One block tile of out = W x by Hopper's wgmma, for linear.cu: BF16, packed weights, rows of x by a tensor map. The order of
// additions is linear_tile.cuh's, chains of 16 inputs in each segment and the tree over the segment sums, and a wgmma of 16
// inputs has the bits of an mma.sync of 16: so has the tile, which the tests compare with those of linear_tile.cuh.
//
// A product has 64 rows of x as A and N outputs' weights as B, both read from shared memory by the tensor cores; warps only
// wait, start products and add segment sums. One thread copies weights into the ring of stages, one copies x. Few threads hold
// many sums, so that a tile is large enough for the rows of x not to be read too often.
#pragma once
#include <algorithm>

#include "linear_wide_store.cuh"

namespace kdtree {

// --- producers: one thread each --------------------------------------------------------------------------------------

// Calls f(first unit, units) for every stage of the block, in order, once its slot is free.
template <class S, class F>
__device__ __forceinline__ void each_stage(const WideTile<S>& tile, WideRing<S>& ring, F&& f) {
#pragma unroll 1
  for (int q = 0; q < S::kSeq; ++q) {
    const Span span = tile.span(q);
#pragma unroll 1
    for (int unit = span.begin; unit < span.end; unit += S::kUnits, ring.next()) {
      barrier_wait(ring.empty_now(), ring.phase ^ 1);  // the first round finds every slot free
      f(unit, min(S::kUnits, span.end - unit));
    }
  }
}

template <class S>
__device__ void copy_weights(const WideArgs& w, const WideTile<S>& tile, WideRing<S> ring) {
  int num_stages = 0;
  each_stage(tile, ring, [&](int unit, int units) {
    barrier_arrive_expect(ring.full_now(), units * S::kBlockTiles * S::kUnitBytes);
    for (int u = 0; u < units; ++u)
      map_copy(ring.weights() + u * S::kBlockTiles * S::kUnitBytes, w.weights, {0, tile.first_out_tile, unit + u, tile.group},
               ring.full_now());
    if (++num_stages == S::kStages) allow_next_kernel();
  });
  if (num_stages < S::kStages) allow_next_kernel();
}

// Before the previous kernel has ended, see prefetch_weights of linear_producer.cuh.
template <class S>
__device__ void prefetch_wide(const TileArgs& a, const WideTile<S>& tile) {
  const int num_tiles = (a.num_out + kOutTile - 1) / kOutTile;
  const int64_t column_bytes = static_cast<int64_t>((a.num_in + kUnit - 1) / kUnit) * S::kUnitBytes;
  for (int t = tile.first_out_tile; t < min(num_tiles, tile.first_out_tile + S::kBlockTiles); ++t)
    prefetch_segments(a, static_cast<const char*>(a.packed) + (int64_t(tile.group) * num_tiles + t) * column_bytes, S::kUnitBytes,
                      tile.split * S::kSeq, S::kSeq);
}

template <class S>
__device__ void copy_rows(const WideArgs& w, const WideTile<S>& tile, WideRing<S> ring) {
  each_stage(tile, ring, [&](int unit, int) {
    barrier_arrive_expect(ring.full_now(), w.rows_per_box * S::kRowBytes);
    map_copy(ring.x(), w.x, {unit * kUnit, tile.row_tile * S::kBlockRows, tile.group, 0}, ring.full_now());
  });
}

// --- consumers -------------------------------------------------------------------------------------------------------

template <class S>
struct WideSums {
  float now[S::kGroups][4], held[S::kHeld > 0 ? S::kHeld : 1][S::kGroups][4];
  uint32_t shared;  // of the levels that registers do not hold: this thread's first 16 bytes

  __device__ __forceinline__ void fill(float start) {
#pragma unroll
    for (int j = 0; j < S::kGroups; ++j) now[j][0] = now[j][1] = now[j][2] = now[j][3] = start;
    pin(now);
  }
  __device__ __forceinline__ uint32_t place(int level, int j) const {
    return shared + ((level - S::kHeld) * S::kGroups + j) * S::kConsumerThreads * 16;
  }
  template <int kLevel>
  __device__ __forceinline__ void add_held() {
#pragma unroll
    for (int j = 0; j < S::kGroups; ++j) {
      float sum[4];
      if constexpr (kLevel < S::kHeld) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[e] = held[kLevel][j][e];
      } else {
        as_floats(load_shared(place(kLevel, j)), sum);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) now[j][e] = sum[e] + now[j][e];
    }
  }
  template <int kLevel>
  __device__ __forceinline__ void hold() {
#pragma unroll
    for (int j = 0; j < S::kGroups; ++j) {
      if constexpr (kLevel >= S::kHeld) {
        store_shared(place(kLevel, j), now[j]);
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) held[kLevel][j][e] = now[j][e];
      }
    }
  }
  // The q-th segment's sum has come: adds what it completes on the tree, and holds the result unless it is the last.
  template <int kLevel = 0>
  __device__ __forceinline__ void fold(int q) {
    if constexpr (kLevel < S::kLevels) {
      if (q >> kLevel & 1) add_held<kLevel>(), fold<kLevel + 1>(q);
      else hold<kLevel>();
    }
  }
};

template <class S>
__device__ __forceinline__ void consume_wide(const WideTile<S>& tile, WideSums<S>& sums, WideRing<S> ring) {
  const int warpgroup = threadIdx.x / 128;
  const uint32_t x_offset = warpgroup % S::kRowGroups * 64 * S::kRowBytes;
  const uint32_t weight_offset = warpgroup / S::kRowGroups * S::kGroups * 512;
  const auto add_unit = [&](int u) {
#pragma unroll
    for (int h = 0; h < 2; ++h)  // 16 inputs each
      wgmma<S::kGroups>(sums.now, matrix(ring.x() + x_offset + u * 64 + h * 32, 8 * S::kRowBytes, true),
                        matrix(ring.weights() + weight_offset + u * S::kBlockTiles * S::kUnitBytes + h * 256, 512, false));
  };
  const auto release = [&](uint32_t empty) {
    if (empty != 0 && threadIdx.x % kWarp == 0) barrier_arrive(empty);
  };
#pragma unroll  // so that no sum is copied from register to register
  for (int q = 0; q < S::kSeq; ++q) {
    const Span span = tile.span(q);
    uint32_t previous = 0;  // read by a product that may not have ended
    sums.fill(tile.mine(q) ? 0.f : -0.f);
    int left = span.end - span.begin;
#pragma unroll 1
    for (; left >= S::kUnits; left -= S::kUnits, ring.next()) {
      barrier_wait(ring.full_now(), ring.phase);
      wgmma_begin();
      add_unit(0);
      add_unit(1);
      wgmma_commit();
      wgmma_wait<1>();
      release(previous);
      previous = ring.empty_now();
    }
    if (left > 0) {
      barrier_wait(ring.full_now(), ring.phase);
      wgmma_begin();
      add_unit(0);
      wgmma_commit();
    }
    wgmma_wait<0>();
    pin(sums.now);
    release(previous);
    if (left > 0) release(ring.empty_now()), ring.next();
    if constexpr (S::kSeq > 1) sums.fold(q);
  }
}

// --- kernel ----------------------------------------------------------------------------------------------------------

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "Hopper needs the target sm_90a"
#endif

template <class S>
__device__ __forceinline__ void begin_wide(const WideTile<S>& tile, uint32_t full, uint32_t empty, uint32_t arrived) {
  for (int s = 0; s < S::kStages; ++s) barrier_init(full + s * 8, 2);  // the threads that copy
  for (int s = 0; s < S::kStages; ++s) barrier_init(empty + s * 8, S::kConsumers * 4);
  barrier_init(arrived, 1);
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
  const int share = max(0, min(S::kShare, S::kGroups - tile.split * S::kShare));
  if (S::kSplit > 1) barrier_arrive_expect(arrived, share * S::kSplit * S::kConsumerThreads * 16);
}

template <class S>
__global__ void __launch_bounds__(S::kThreads, S::kMinBlocks)
    linear_wide_kernel(const __grid_constant__ TileArgs a, const __grid_constant__ WideArgs w) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32_t full = (shared_address(shared) + 1023) & ~1023u, empty = full + S::kMaxStages * 8;
  const uint32_t arrived = empty + S::kMaxStages * 8, sums_of_all = full + S::kBarrierBytes, held = sums_of_all + S::kSumBytes;
  const int warp = threadIdx.x / kWarp;
  constexpr int kWeightWarp = S::kConsumers * 4, kRowWarp = kWeightWarp + 1;
  const WideTile<S> tile(a);
  const WideRing<S> ring = {full, empty, held + S::kHeldBytes};
  if (warp == kWeightWarp) {
    if (elect_one()) prefetch_map(w.weights), prefetch_map(w.x), begin_wide<S>(tile, full, empty, arrived);
    __syncwarp();
    block_arrive<1>(S::kThreads);  // it need not wait for the others before it copies
  } else {
    block_meet<1>(S::kThreads);
  }
  const bool early = a.weights_settled && tile.row_tile == 0;
  const auto rows_of_step = [&] { return wait_for_previous_kernel(), rows_in_use(a.num_rows_device, a.num_rows, a.row_begin); };
  int num_rows = 0;
  if (a.allow_at_once) allow_next_kernel();
  if (!early) {
    if (a.prefetch_weights && tile.row_tile == 0 && warp == kWeightWarp && elect_one()) prefetch_wide<S>(a, tile);
    num_rows = rows_of_step();
    if (tile.row_tile * S::kBlockRows >= num_rows) return;
  }
  if constexpr (S::kSplit > 1) cluster_arrive();

  if (warp >= kWeightWarp) {
    if constexpr (S::kMovesRegisters) give_registers<24>();
    if (warp == kWeightWarp && elect_one()) copy_weights<S>(w, tile, ring);
    if (warp == kRowWarp && elect_one()) {
      if (early) wait_for_previous_kernel();
      copy_rows<S>(w, tile, ring);
    }
    __syncwarp();
    if constexpr (S::kSplit > 1) cluster_wait();
  } else {
    if constexpr (S::kMovesRegisters) take_registers<240>();
    WideSums<S> sums;
    sums.shared = held + threadIdx.x * 16;
    consume_wide<S>(tile, sums, ring);
    if (early) num_rows = rows_of_step();
    const WideStore<S> store(a, w, tile, num_rows);
    if constexpr (S::kSplit == 1) {
      store.all(sums.now);
    } else {
      cluster_wait();  // the other blocks have begun
      send_columns<S>(tile, sums.now, sums_of_all, arrived);
      barrier_wait(arrived, 0);
      combine_columns<S>(store, tile.split, sums_of_all);
    }
  }
#endif
}

// --- host ------------------------------------------------------------------------------------------------------------

template <class S>
int make_maps(const TileArgs& a, int num_groups, WideArgs* w) {
  const cuuint64_t tiles = ceil_div(a.num_out, kOutTile), units = ceil_div(a.num_in, kUnit), groups = num_groups;
  const MapArgs weights = {CU_TENSOR_MAP_DATA_TYPE_UINT64, a.packed, {S::kUnitBytes / 8, tiles, units, groups},
                           {units * S::kUnitBytes, S::kUnitBytes, tiles * units * S::kUnitBytes},
                           {S::kUnitBytes / 8, S::kBlockTiles, 1, 1}, false};
  // A box has no more rows than there are: rows outside the array are filled with zeros more slowly than others are copied.
  w->rows_per_box = static_cast<int>(std::min<int64_t>(S::kBlockRows, ceil_div(a.num_rows, 8) * 8));
  const cuuint64_t row_bytes = a.x_row_stride * 2, group_bytes = num_groups > 1 ? a.x_group_stride * 2 : row_bytes;
  const MapArgs x = {CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, a.x, {cuuint64_t(a.num_in), cuuint64_t(a.num_rows), groups, 1},
                     {row_bytes, group_bytes, group_bytes}, {S::kRowBytes / 2, cuuint32_t(w->rows_per_box), 1, 1}, true};
  if (int status = make_map(weights, &w->weights)) return status;
  return make_map(x, &w->x);
}

// The most stages that a block of the cluster fills, at most all of the ring.
template <class S>
int num_wide_stages(const TileArgs& a) {
  int most = 0;
  for (int split = 0; split < S::kSplit; ++split) {
    int num_stages = 0;
    for (int s = split * S::kSeq; s < (split + 1) * S::kSeq; ++s) {
      const Span span = segment_span(s, a.whole_units, a.first_segment, a.end_segment);
      num_stages += (span.end - span.begin + S::kUnits - 1) / S::kUnits;
    }
    most = std::max(most, num_stages);
  }
  return std::min(most, S::kStages);
}

template <class S>
int launch_wide(TileArgs a, int num_groups, void* stream) {
  if (!a.x_aligned || a.items != nullptr) return kUnsupported;
  WideArgs w;
  if (int status = make_maps<S>(a, num_groups, &w)) return status;
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 32 == 0; };
  w.out_in_eights = a.num_out % 8 == 0 && aligned(a.out) && aligned(a.residual);
  a.num_row_tiles = static_cast<int>(ceil_div(a.num_rows, S::kBlockRows));
  const int64_t num_blocks = ceil_div(a.num_out, S::kBlockOut) * a.num_row_tiles * S::kSplit;
  if (num_blocks > INT32_MAX || num_groups > 65535) return kUnsupported;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(num_blocks), num_groups);
  shape.block = dim3(S::kThreads);
  shape.shared_limit = S::kFixedBytes + S::kStages * S::kStageBytes;
  shape.shared_bytes = S::kFixedBytes + num_wide_stages<S>(a) * S::kStageBytes;
  shape.cluster = S::kSplit;
  shape.start = Start::kEarly;
  return launch(linear_wide_kernel<S>, shape, stream, a, w);
}

}  // namespace kdtree
