// The tile of linear_wide.cuh: its shape, which outputs, rows and units a block owns, and its ring of stages.
#pragma once
#include "linear_tile.cuh"
#include "linear_wgmma.cuh"

namespace kdtree {

// Rows: of a block, 32, 64 or 128; of 32 the products read what lies behind them as 32 more, whose sums nobody looks at.
// OutGroups warpgroups of N outputs each, for every 64 rows. A cluster of Split blocks shares the segments of a tile. SharedKB:
// of a block at most; it takes what its stages need.
template <int Rows, int OutGroups, int N, int Split, int MinBlocks, int SharedKB>
struct WideShape {
  static constexpr int kRowGroups = Rows > 64 ? Rows / 64 : 1, kSplit = Split, kMinBlocks = MinBlocks, kGroups = N / 8;
  static constexpr int kBlockRows = Rows, kBlockOut = OutGroups * N, kBlockTiles = kBlockOut / kOutTile;
  static constexpr int kConsumers = kRowGroups * OutGroups, kConsumerThreads = kConsumers * 128;
  static constexpr int kSeq = kNumSegments / Split, kUnits = 2;
  static constexpr int kRowBytes = kUnits * kUnit * 2, kUnitBytes = kUnit * kOutTile * 2;
  static constexpr int kXBytes = kBlockRows * kRowBytes, kStageBytes = kXBytes + kBlockTiles * kUnits * kUnitBytes;
  // Sums of earlier segments on hold: as many levels of the tree as fit in registers, the rest in shared memory.
  static constexpr int kLevels = kSeq == 1 ? 0 : kSeq == 2 ? 1 : kSeq == 4 ? 2 : 3;
  static constexpr int kSumRegisters = kConsumers == 1 ? 200 : 192, kFit = kSumRegisters / (N / 2) - 1;
  static constexpr int kHeld = kFit < kLevels ? kFit : kLevels;
  static constexpr bool kMovesRegisters = kConsumers == 2 && MinBlocks == 1 && (1 + kHeld) * (N / 2) > 144;
  static constexpr int kThreads = kConsumerThreads + (kMovesRegisters ? 128 : 2 * kWarp);
  static constexpr int kHeldBytes = (kLevels - kHeld) * kGroups * kConsumerThreads * 16;
  static constexpr int kShare = (kGroups + Split - 1) / Split;  // column groups of a warpgroup that one block combines
  static constexpr int kSumBytes = Split == 1 ? 0 : kShare * Split * kConsumerThreads * 16;
  static constexpr int kMaxStages = 16, kBarrierBytes = 1024, kFixedBytes = 1024 + kBarrierBytes + kSumBytes + kHeldBytes;
  static constexpr int kRoom = (SharedKB * 1024 - kFixedBytes) / kStageBytes, kStages = kRoom < kMaxStages ? kRoom : kMaxStages;
  static_assert(kStages >= 2 && SharedKB <= 227 && kBlockOut % kOutTile == 0 && kHeld >= 0, "tile shape");
  static_assert(Rows % 64 == 0 || kStageBytes >= 64 * kRowBytes, "there is something behind the rows");
};

// What the copies need to know: maps of the packed weights, 16 x 32 blocks by [group, unit, tile], and of x, [group, row, K].
struct WideArgs {
  CUtensorMap weights, x;
  int rows_per_box;
  bool out_in_eights;  // outputs may be written, and the residual read, in vectors of 8
};

template <class S>
struct WideTile {
  static constexpr int kBand = 16;  // row tiles that run side by side, so that they find weights and rows in L2
  int split, row_tile, first_out_tile, group, whole_units, first_segment, end_segment;

  __device__ explicit WideTile(const TileArgs& a) {
    const int cluster = blockIdx.x / S::kSplit, num_across = (a.num_out + S::kBlockOut - 1) / S::kBlockOut;
    const int band = cluster / (kBand * num_across), in_band = cluster - band * kBand * num_across;
    const int height = min(kBand, a.num_row_tiles - band * kBand);
    split = blockIdx.x % S::kSplit, row_tile = band * kBand + in_band % height;
    first_out_tile = in_band / height * S::kBlockTiles, group = blockIdx.y;
    whole_units = a.whole_units, first_segment = a.first_segment, end_segment = a.end_segment;
  }

  __device__ bool mine(int q) const {
    return split * S::kSeq + q >= first_segment && split * S::kSeq + q < end_segment;
  }
  __device__ Span span(int q) const {
    return segment_span(split * S::kSeq + q, whole_units, first_segment, end_segment);
  }
};

// The stages: 64 inputs of the block's rows and weights. What is filled and read next.
template <class S>
struct WideRing {
  uint32_t full, empty, stages;
  int slot = 0;
  uint32_t phase = 0;  // of the slot's barriers; flips when the ring wraps

  __device__ __forceinline__ void next() {
    if (++slot == S::kStages) slot = 0, phase ^= 1;
  }
  __device__ __forceinline__ uint32_t x() const { return stages + slot * S::kStageBytes; }
  __device__ __forceinline__ uint32_t weights() const { return x() + S::kXBytes; }
  __device__ __forceinline__ uint32_t full_now() const { return full + slot * 8; }
  __device__ __forceinline__ uint32_t empty_now() const { return empty + slot * 8; }
};

}  // namespace kdtree
