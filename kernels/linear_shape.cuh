// The tile of linear_tile.cuh: its arguments, its shape, and which outputs, rows and units a block owns.
#pragma once
#include "cuda_async.cuh"
#include "int4_layout.h"
#include "segments.h"

namespace kdtree {

constexpr int kUnit = static_cast<int>(kSegmentUnit), kOutTile = 16, kRowTile = 8;
constexpr int kHopperSharedBytes = 227 * 1024;
constexpr int kMaxPairs = 288, kRowsOfPairs = kRowTile;  // of experts whose pairs no kernel has grouped; rows of a tile
static_assert(kMaxPairs % kWarp == 0, "find_pairs reads them warp by warp");

// Offset of the 16-byte chunk c of row m in a unit of x: swizzled, so that 8 rows are read without bank conflicts.
template <class T>
__device__ __forceinline__ uint32_t row_chunk(int m, int c) {
  return sizeof(T) == 4 ? m * 128 + (c ^ m % 8) * 16 : m * 64 + (c ^ m / 2 % 4) * 16;
}

struct TileArgs {
  const void* x;               // T [rows, groups, K], strides below, in elements
  const void* packed;          // T [groups, ceil(N/16), ceil(K/32), 512], or INT4, see PackInt4Args
  const void* residual;        // T, as out, or nullptr
  void* out;                   // T or f32 [rows, groups, N]; for partial sums f32 [rows, 8, N]
  int64_t x_row_stride, x_group_stride, out_row_stride, out_group_stride;
  int64_t num_rows, row_begin;  // row_begin: what to take off *num_rows_device
  const int32_t* num_rows_device;
  int num_out, num_in, num_row_tiles;
  int first_rank, num_ranks;  // where blocks leave partial sums: those that have a segment that is summed here
  bool x_aligned, out_aligned, out_f32, weights_settled;
  // Tried, never won: no product sets them. Without the code for them ptxas 13.0 gives several shapes more registers, and spills.
  bool prefetch_weights, allow_at_once;
  // The segments that are summed here, [first_segment, end_segment) of a reduction over whole_units units; K is theirs.
  // Those of other ranks count as -0, which changes no sum.
  int whole_units, first_segment, end_segment;
  // Experts: row tile i is items[i] = {expert, first, count, 0} and its rows are row_list[first …]: row r of out, row
  // r / rows_per_source of x. nullptr for a dense linear, where blockIdx.y is the group.
  const int4* items;
  const int32_t* num_items;
  const int32_t* row_list;
  int rows_per_source;
  // Or, for at most kMaxPairs rows in tiles of kRowsOfPairs: row r, of pairs_per_row for each of num_rows, is of expert
  // pair_expert[r]. A row tile begins at each; it has rows if those of its expert before are whole tiles.
  const int32_t* pair_expert;
  int pairs_per_row, num_experts;

  __device__ bool of_experts() const { return items != nullptr || pair_expert != nullptr; }
};

// Warps: SegWarps over segments x OutWarps over outputs x RowWarps over rows; a warp computes OutTiles x 16 outputs of
// RowTiles x 8 rows and takes Seq segments one after the other. A cluster of Cluster blocks shares the segments of a tile.
// Units: units of each segment in a stage. Partials: write the segment sums, uncombined (then no cluster is launched).
// kInt4: INT4 weights and BF16 rows; kInt4Wgmma: multiplied by Hopper's wgmma, four warps over outputs at a time. MinBlocks
// kWholeSm: one block that has all shared memory of a multiprocessor of Hopper. Swiglu: the outputs are gates, then as many ups,
// and what is written is their swiglu; half of a block's tiles are gates, the other half the ups of the same outputs.
enum TileKind { kFloats, kInt4, kInt4Wgmma };
constexpr int kWholeSm = 0;

template <class T_, int SegWarps, int OutWarps, int RowWarps, int OutTiles, int RowTiles, int Units, int Seq, int Cluster,
          int MinBlocks, bool Partials = false, TileKind Kind = kFloats, bool Swiglu = false>
struct TileShape {
  using T = T_;
  static constexpr int kSegWarps = SegWarps, kOutWarps = OutWarps, kRowWarps = RowWarps, kOutTiles = OutTiles;
  static constexpr int kRowTiles = RowTiles, kUnits = Units, kSeq = Seq, kCluster = Cluster;
  static constexpr int kMinBlocks = MinBlocks == kWholeSm ? 1 : MinBlocks;
  static constexpr bool kPartials = Partials, kIsInt4 = Kind != kFloats, kWgmma = Kind == kInt4Wgmma;
  static constexpr bool kSwiglu = Swiglu;
  static constexpr bool kHopper = kWgmma || MinBlocks == kWholeSm;
  static constexpr int kConsumers = SegWarps * OutWarps * RowWarps, kThreads = (kConsumers + 2) * kWarp;
  static constexpr int kBlockTiles = OutWarps * OutTiles, kBlockOut = kBlockTiles * kOutTile;
  static constexpr int kBlockRows = RowWarps * RowTiles * kRowTile;
  // In memory a unit of kColumnTiles tiles is contiguous, in a stage a unit of kCopyTiles. A ragged block begins anywhere in a
  // column: its outputs are as many as make the number of blocks fit the multiprocessors.
  static constexpr int kColumnTiles = kIsInt4 ? kInt4ColumnTiles : 1;
  static constexpr int kRuns = Swiglu ? 2 : 1, kRunTiles = kBlockTiles / kRuns;  // runs of neighbouring tiles
  static constexpr bool kRagged = kRunTiles % kColumnTiles != 0 && kColumnTiles % kRunTiles != 0;
  static constexpr int kCopyTiles = kRagged || kRunTiles < kColumnTiles ? kRunTiles : kColumnTiles;
  static constexpr int kUnitBytes = kIsInt4 ? kInt4BlockBytes : kUnit * kOutTile * sizeof(T), kRowBytes = kUnit * sizeof(T);
  static constexpr int kWeightAlign = kWgmma ? 512 : 16;  // of the rows behind the weights: a swizzle of wgmma repeats after 512
  static constexpr int kWeightBytes = (SegWarps * kBlockTiles * Units * kUnitBytes + kWeightAlign - 1) / kWeightAlign * kWeightAlign;
  static constexpr int kStageBytes = kWeightBytes + SegWarps * Units * kBlockRows * kRowBytes;
  // Sums: the segment sums of an output that meet after the main loop, in the memory of the stages.
  // Fragments of 16 outputs x 8 rows of a run, of which a block of the cluster combines at most kShare.
  static constexpr int kFragments = kRunTiles * RowWarps * RowTiles, kShare = (kFragments + Cluster - 1) / Cluster;
  static constexpr int kSums = SegWarps * Cluster, kFragmentBytes = kSums * kWarp * 16;
  static constexpr int kSumBytes = Partials || kSums == 1 ? 0 : kRuns * kShare * kFragmentBytes;
  // Barriers: full, empty of each stage, one for the sums; behind them a list of rows.
  static constexpr int kMaxStages = 7, kListBytes = kBlockRows == kRowsOfPairs ? kRowsOfPairs * 4 : 0;
  static constexpr int kBarrierBytes = kWgmma ? 1024 : kMaxStages * 16 + 16 + kListBytes;
  static constexpr int kAlign = kWgmma ? 1024 : 128, kMostShared = MinBlocks == kWholeSm ? kHopperSharedBytes : kMaxSharedBytes;
  static constexpr int kRoom = MinBlocks > 2 ? 224 * 1024 / MinBlocks : kMostShared;
  static constexpr int kFit = (kRoom - kBarrierBytes - (kWgmma ? kAlign : 0)) / kStageBytes;
  static constexpr int kStages = kFit < kMaxStages ? kFit : kMaxStages;
  static constexpr int kSharedBytes = (kWgmma ? kAlign : 0) + kBarrierBytes +
                                      (kStages * kStageBytes > kSumBytes ? kStages * kStageBytes : kSumBytes);
  static_assert(SegWarps * Seq * Cluster == kNumSegments && kStages >= 2 && kSharedBytes <= kMostShared, "tile shape");
  static_assert(!Swiglu || (!kRagged && !Partials && !kWgmma && kSums > 1 && kBlockTiles % 2 == 0), "gates meet their ups");
  static_assert(Units <= 2 || !kWgmma, "products of one or two units at a time");
  static_assert(!Partials || Seq == 1, "partial sums are of one segment");
  static_assert(kBlockTiles % kCopyTiles == 0 && (OutTiles % kCopyTiles == 0 || kCopyTiles % OutTiles == 0), "whole copies");
  static_assert(!kWgmma || (OutWarps % 4 == 0 && RowWarps == 1 && OutTiles == 1), "a warpgroup has a column of outputs");

  // In a stage: the first unit of a tile of a segment warp, and the distance to its second.
  static constexpr int kUnitStride = kCopyTiles * kUnitBytes;
  static __host__ __device__ constexpr int tile_offset(int tile) {
    return tile / kCopyTiles * Units * kUnitStride + tile % kCopyTiles * kUnitBytes;
  }
};

struct Span {  // units of one segment
  int begin, end;
};

// Of segment s, counted from the first unit that is summed here; empty where it is another rank's.
__host__ __device__ __forceinline__ Span segment_span(int s, int whole_units, int first_segment, int end_segment) {
  if (s < first_segment || s >= end_segment) return {0, 0};
  const unsigned units = whole_units, first = first_segment * units / kNumSegments;
  return {static_cast<int>(s * units / kNumSegments - first), static_cast<int>((s + 1) * units / kNumSegments - first)};
}

inline void set_segments(TileArgs* a, const SegmentShare& share) {
  const int64_t whole = share.count ? share.whole : a->num_in;
  a->whole_units = static_cast<int>(ceil_div(whole, kUnit));
  a->first_segment = share.count ? share.first : 0;
  a->end_segment = share.count ? share.first + share.count : kNumSegments;
}

template <class S>
struct Tile {
  int rank, row_tile, first_out_tile, group, num_units, num_stages_per_segment, row_begin, num_rows;
  int whole_units, first_segment, end_segment;
  const TileArgs& args;  // a kernel's parameter: what is read there takes no register
  const int32_t* rows;  // or nullptr: row_begin + m

  // Of the `block`-th block of the product.
  __device__ Tile(const TileArgs& a, int block) : args(a) {
    const int num_ranks = S::kPartials ? a.num_ranks : S::kCluster, cluster = block / num_ranks;
    rank = block - cluster * num_ranks + (S::kPartials ? a.first_rank : 0);
    row_tile = cluster % a.num_row_tiles;
    first_out_tile = cluster / a.num_row_tiles * S::kRunTiles;
    group = blockIdx.y;
    num_units = (a.num_in + kUnit - 1) / kUnit;
    whole_units = a.whole_units, first_segment = a.first_segment, end_segment = a.end_segment;
    const int longest = (whole_units + kNumSegments - 1) / kNumSegments;
    num_stages_per_segment = (longest + S::kUnits - 1) / S::kUnits;
    row_begin = num_rows = 0;
    rows = nullptr;
  }

  // Reads what an earlier kernel may have counted. The same answer in all blocks of a cluster.
  __device__ void find_rows(const TileArgs& a) {
    if (a.items == nullptr) {
      row_begin = row_tile * S::kBlockRows;
      const int left = rows_in_use(a.num_rows_device, a.num_rows, a.row_begin) - row_begin;
      num_rows = left < 0 ? 0 : left < S::kBlockRows ? left : S::kBlockRows;
    } else if (row_tile < *a.num_items) {
      const int4 item = a.items[row_tile];
      group = item.x, rows = a.row_list + item.y, num_rows = item.z;
    }
  }

  // The rows where no kernel has grouped them. All warps find the same; the first leaves them in `list`, for all after a barrier.
  __device__ void find_pairs(const TileArgs& a, int32_t* list) {
    constexpr int kWords = kMaxPairs / kWarp;
    const int num_places = static_cast<int>(a.num_rows) * a.pairs_per_row, lane = threadIdx.x % kWarp;
    const int expert = a.pair_expert[row_tile];
    unsigned same[kWords];  // bit by pair: of the tile's expert
    int id[kWords], num_before = 0, num_same = 0;
#pragma unroll  // all of them, whether in use or not: one read after the other would take twice as long
    for (int w = 0; w < kWords; ++w) id[w] = w * kWarp + lane < num_places ? a.pair_expert[w * kWarp + lane] : -1;
    const int num_pairs = rows_in_use(a.num_rows_device, a.num_rows, a.row_begin) * a.pairs_per_row;
    if (row_tile >= num_pairs) return;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      same[w] = __ballot_sync(0xffffffffu, w * kWarp + lane < num_pairs && id[w] == expert);
      const int bits = min(max(row_tile - w * kWarp, 0), kWarp);  // pairs of this word before the tile's
      num_before += __popc(same[w] & static_cast<unsigned>((uint64_t{1} << bits) - 1));
      num_same += __popc(same[w]);
    }
    if (expert < 0 || expert >= a.num_experts || num_before % kRowsOfPairs != 0) return;
    group = expert, rows = list, num_rows = min(num_same - num_before, kRowsOfPairs);
    if (threadIdx.x >= kWarp) return;
    int place = __popc(same[0] & ((1u << lane) - 1)) - num_before;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      if ((same[w] >> lane & 1) && place >= 0 && place < kRowsOfPairs) list[place] = w * kWarp + lane;
      if (w + 1 < kWords)
        place += __popc(same[w] >> lane) + __popc(same[w + 1] & ((1u << lane) - 1));
    }
  }

  __device__ int out_row(int m) const { return rows == nullptr ? row_begin + m : rows[m]; }

  __device__ int segment(int seg_warp, int q) const { return (rank * S::kSegWarps + seg_warp) * S::kSeq + q; }
  __device__ bool mine(int seg_warp, int q) const {
    return segment(seg_warp, q) >= args.first_segment && segment(seg_warp, q) < args.end_segment;
  }
  // Whether the q-th segment of any warp is summed here. If not, there are no stages for it.
  __device__ bool any_mine(int q) const {
    bool any = false;
#pragma unroll
    for (int s = 0; s < S::kSegWarps; ++s) any |= mine(s, q);
    return any;
  }
  __device__ Span span(int seg_warp, int q) const {
    return segment_span(segment(seg_warp, q), whole_units, first_segment, end_segment);
  }
};

// A stage: the i-th of the q-th segment of every warp.
template <class S>
struct Cursor {
  int slot = 0, q = 0, i = 0;  // slot of the ring; segment; stage of the segment
  uint32_t phase = 0;          // of the slot's barriers; flips when the ring wraps

  __device__ __forceinline__ void next() {
    if (++slot == S::kStages) slot = 0, phase ^= 1;
  }
};

// Calls f(cursor) for every stage in the order in which they are filled and read: all of a segment, then the next.
template <class S, class F>
__device__ __forceinline__ void each_stage(const Tile<S>& tile, F&& f) {
  Cursor<S> at;
#pragma unroll 1
  for (; at.q < S::kSeq; ++at.q) {
    if (S::kSeq > 1 && !tile.any_mine(at.q)) continue;
#pragma unroll 1
    for (at.i = 0; at.i < tile.num_stages_per_segment; ++at.i, at.next()) f(at);
  }
}

}  // namespace kdtree
