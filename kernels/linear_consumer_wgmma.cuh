// The consumer warps of linear_tile.cuh that multiply INT4 weights by Hopper's wgmma: four warps, of 16 outputs each, make the
// values of a stage in registers and start its products, which read the rows from the stage. While one group of four warps
// waits for its products, others make values.
#pragma once
#include <type_traits>

#include "linear_consumer.cuh"
#include "linear_wgmma.cuh"

namespace kdtree {

template <int kValue>
using Constant = std::integral_constant<int, kValue>;

template <class S>
__device__ __forceinline__ void consume_wgmma(const Tile<S>& tile, Accumulator<S>& acc, uint32_t full, uint32_t empty,
                                              uint32_t stages) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  const int lane = threadIdx.x % kWarp;
  const WarpPlace<S> at_warp;
  const uint32_t weights = stages + at_warp.segment * S::kBlockTiles * S::kUnits * S::kUnitBytes +
                           S::tile_offset(at_warp.out_tile) + Accumulator<S>::weight_offset(lane);
  const uint32_t x = stages + S::kWeightBytes + at_warp.segment * S::kUnits * S::kBlockRows * S::kRowBytes;
  float(&sums)[S::kRowTiles][4] = acc.value[0];
  Fold<S> fold;
  Cursor<S> at;
  // Values first, then all products: one between them would make the compiler wait for every product by itself.
  const auto add = [&](uint32_t offset, auto units) {
    constexpr int kUnits = decltype(units)::value;
    uint4 values[kUnits][2];
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const Int4Fragments block(weights + offset + u * S::kUnitStride, lane);
      values[u][0] = block.get(0), values[u][1] = block.get(1);
    }
    wgmma_begin();
#pragma unroll
    for (int u = 0; u < kUnits; ++u)
#pragma unroll
      for (int h = 0; h < 2; ++h)  // 16 inputs each
        wgmma(sums, values[u][h], matrix_of_short_rows(x + offset + u * S::kBlockRows * S::kRowBytes + h * 32,
                                                       kRowTile * S::kRowBytes));
    wgmma_commit();
    wgmma_wait<0>();
  };
#pragma unroll 1
  for (int q = 0; q < S::kSeq; ++q) {
    const Span span = tile.span(at_warp.segment, q);
    const int num_stages = S::kSeq > 1 && !tile.any_mine(q) ? 0 : tile.num_stages_per_segment;
    int left = span.end - span.begin;
    acc.fill(tile.mine(at_warp.segment, q) ? 0.f : -0.f);
    pin(sums);
#pragma unroll 1
    for (int i = 0; i < num_stages; ++i, left -= S::kUnits, at.next()) {
      barrier_wait(full + at.slot * 8, at.phase);
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the rows came by ordinary copies
      if (left >= S::kUnits) add(at.slot * S::kStageBytes, Constant<S::kUnits>());
      else if (S::kUnits == 2 && left == 1) add(at.slot * S::kStageBytes, Constant<1>());
      __syncwarp();
      if (lane == 0) barrier_arrive(empty + at.slot * 8);
    }
    pin(sums);
    if constexpr (S::kSeq > 1) fold.take(q, acc);
  }
#endif
}

}  // namespace kdtree
