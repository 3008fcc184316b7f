// The tile shapes of linear and moe_experts with INT4 weights: those of linear_tile.cuh, whose consumer warps turn the values
// into BF16 in registers. Any shape gives the same bits, those of the BF16 weights that dequantize_int4 makes.
#include "expert_tiles.cuh"
#include "linear.cuh"

namespace kdtree {
namespace {

using Bf16 = __nv_bfloat16;

template <TileKind Kind, bool Partials, int SegWarps, int OutWarps, int OutTiles, int RowTiles, int Units, int Seq, int Cluster,
          int MinBlocks>
constexpr LinearShape describe(const char* name) {
  using S = TileShape<Bf16, SegWarps, OutWarps, 1, OutTiles, RowTiles, Units, Seq, Cluster, MinBlocks, Partials, Kind>;
  return {name, S::kBlockRows, S::kBlockOut, S::kCluster, S::kHopper, false, launch_tile<S>};
}
// The same, which moe_experts may launch with the shared expert's product beside it.
template <bool Partials, int SegWarps, int OutWarps, int OutTiles, int RowTiles, int Units, int Seq, int Cluster, int MinBlocks>
constexpr LinearShape describe_beside(const char* name) {
  using S = TileShape<Bf16, SegWarps, OutWarps, 1, OutTiles, RowTiles, Units, Seq, Cluster, MinBlocks, Partials, kInt4>;
  LinearShape shape = describe<kInt4, Partials, SegWarps, OutWarps, OutTiles, RowTiles, Units, Seq, Cluster, MinBlocks>(name);
  shape.run_beside = launch_beside<S>;
  return shape;
}
// With the shape that takes its place where swiglu is done by the up products: copies of whole columns of gates and of ups.
template <int SegWarps, int OutWarps, int OutTiles, int Units, int Cluster>
constexpr LinearShape with_swiglu(LinearShape shape) {
  using S = TileShape<Bf16, SegWarps, OutWarps, 1, OutTiles, 1, Units, 1, Cluster, 2, false, kInt4, true>;
  shape.run_swiglu_beside = launch_swiglu_beside<S>;
  return shape;
}
#define KDTREE_INT4(...) describe<kInt4, false, __VA_ARGS__>("int4, " #__VA_ARGS__)
#define KDTREE_INT4_WGMMA(...) describe<kInt4Wgmma, false, __VA_ARGS__>("int4 wgmma, " #__VA_ARGS__)
#define KDTREE_INT4_PARTS(...) describe<kInt4, true, __VA_ARGS__>("int4 segments, " #__VA_ARGS__)
#define KDTREE_INT4_BESIDE(...) describe_beside<false, __VA_ARGS__>("int4, " #__VA_ARGS__)
#define KDTREE_INT4_PARTS_BESIDE(...) describe_beside<true, __VA_ARGS__>("int4 segments, " #__VA_ARGS__)

// Warps over segments, outputs; 16-output and 8-row tiles of a warp; units of a stage; segments in sequence; cluster; blocks of
// a multiprocessor. The number in a name is the rows of a block; the fastest of 52 tried on an H200, and what needs no clusters.
enum Int4Shape : int {
  k8, k8Experts, k8Short, k8Long, k8Wide, k16, k16Pairs, k32, k32Fours, k32Short, k32Wgmma, k32Even,
  k64, k64Pairs, k64WgmmaPairs, k64Wgmma, k128, k128Wgmma, kNumInt4Shapes
};
constexpr LinearShape kShapes[kNumInt4Shapes] = {
    KDTREE_INT4(8, 1, 4, 1, 1, 1, 1, 2),                                     // k8: 64 outputs
    with_swiglu<8, 1, 8, 1, 1>(KDTREE_INT4_BESIDE(8, 1, 8, 1, 1, 1, 1, 2)),  // k8Experts: 128
    with_swiglu<2, 4, 2, 2, 4>(KDTREE_INT4_BESIDE(4, 2, 2, 1, 2, 1, 2, 2)),  // k8Short: 64, two blocks share them
    KDTREE_INT4(4, 2, 2, 1, 4, 1, 2, 2),                                     // k8Long: the same, stages of four units
    KDTREE_INT4(4, 4, 2, 1, 2, 1, 2, 1),                                     // k8Wide: 128, two blocks
    KDTREE_INT4(8, 1, 4, 2, 1, 1, 1, 2),                                     // k16: 64
    KDTREE_INT4(4, 2, 2, 2, 2, 1, 2, 2),                                     // k16Pairs: 64, two blocks
    KDTREE_INT4(4, 2, 2, 4, 1, 2, 1, 2),                                     // k32: 64
    KDTREE_INT4(2, 4, 2, 4, 2, 1, 4, 2),                                     // k32Fours: 128, four blocks
    KDTREE_INT4(8, 1, 2, 4, 1, 1, 1, 2),                                     // k32Short: 32
    KDTREE_INT4_WGMMA(2, 8, 1, 4, 2, 2, 2, 1),                               // k32Wgmma: 128, two blocks
    KDTREE_INT4(4, 3, 3, 4, 1, 2, 1, 1),                                     // k32Even: 144, 128 blocks of 18432
    KDTREE_INT4(2, 4, 2, 8, 1, 4, 1, 1),                                     // k64: 128
    KDTREE_INT4(2, 4, 2, 8, 1, 2, 2, 1),                                     // k64Pairs: 128, two blocks
    KDTREE_INT4_WGMMA(1, 8, 1, 8, 2, 4, 2, 2),                               // k64WgmmaPairs: 128, two blocks
    KDTREE_INT4_WGMMA(1, 8, 1, 8, 2, 2, 4, 2),                               // k64Wgmma: 128, four blocks
    KDTREE_INT4(1, 8, 1, 16, 1, 8, 1, 1),                                    // k128: 128
    KDTREE_INT4_WGMMA(1, 8, 1, 16, 2, 2, 4, 1),                              // k128Wgmma: 128, four blocks
};

static_assert(kShapes[k8Wide].num_rows == 8 && kShapes[k16Pairs].num_rows == 16 && kShapes[k32Even].num_rows == 32 &&
              kShapes[k64Wgmma].num_rows == 64 && kShapes[k128Wgmma].num_rows == 128, "Int4Shape");

// Those that leave the segment sums of an expert's down projection apart, for 8, 32 and 64 rows.
constexpr LinearShape kPartialShapes[] = {
    KDTREE_INT4_PARTS(8, 1, 4, 1, 1, 1, 1, 2), KDTREE_INT4_PARTS_BESIDE(8, 1, 8, 1, 1, 1, 1, 2), KDTREE_INT4_PARTS(4, 2, 4, 1, 1, 1, 2, 2),
    KDTREE_INT4_PARTS(8, 1, 4, 1, 1, 1, 1, 3), KDTREE_INT4_PARTS(2, 4, 4, 1, 1, 1, 4, 2), KDTREE_INT4_PARTS(4, 2, 2, 4, 1, 1, 2, 2),
    KDTREE_INT4_PARTS(8, 1, 7, 1, 1, 1, 1, 2), KDTREE_INT4_PARTS(8, 1, 4, 1, 2, 1, 1, 2),
    KDTREE_INT4_PARTS(2, 4, 2, 4, 2, 1, 4, 2), KDTREE_INT4_PARTS(2, 4, 2, 8, 1, 1, 4, 1),
    // A share of few segments: all warps on the same one, or most would have none.
    KDTREE_INT4_PARTS_BESIDE(1, 8, 1, 1, 4, 1, 8, 4), KDTREE_INT4_PARTS(1, 7, 2, 1, 4, 1, 8, 3), KDTREE_INT4_PARTS(1, 8, 2, 1, 4, 1, 8, 2),
    KDTREE_INT4_PARTS(2, 4, 2, 1, 4, 1, 4, 2), KDTREE_INT4_PARTS(1, 8, 2, 4, 2, 1, 8, 2), KDTREE_INT4_PARTS(1, 8, 2, 8, 2, 1, 8, 1),
};

}  // namespace

int num_int4_partial_shapes() { return sizeof(kPartialShapes) / sizeof(kPartialShapes[0]); }

const LinearShape& int4_partial_shape(int index) { return kPartialShapes[index]; }

// Measured at 8 rows of an expert (tests/cuda/run_int4.py); with fewer blocks than multiprocessors several share a tile.
Int4ExpertShapes choose_int4_experts(const MoeExpertsArgs& a, const LinearDevice& device) {
  const int rows_per_item = moe_rows_per_item(a);
  const Segments segments = down_segments(a, false);
  const bool share = segments.end - segments.first_in_use() <= kFewSegments;
  if (rows_per_item == 32) return {k32, share ? 14 : 5};
  if (rows_per_item == 64) return {k64, share ? 15 : 9};
  const int64_t blocks = std::min(a.num_rows * a.top_k, a.num_experts) * ceil_div(2 * a.width, 128);  // at most
  return {device.clusters && blocks < device.num_multiprocessors ? k8Short : k8Experts, share ? 10 : 1};
}

int num_int4_shapes() { return kNumInt4Shapes; }

const LinearShape& int4_shape(int index) { return kShapes[index]; }

// Whether a shape gives every multiprocessor about as many blocks as stated, and none of them more.
static bool blocks_of_each(const LinearArgs& a, const LinearDevice& device, int index, int num_blocks) {
  const LinearShape& shape = kShapes[index];
  const int64_t tiles = ceil_div(a.num_out, shape.num_out) * a.num_groups * ceil_div(a.num_rows, shape.num_rows);
  const int64_t blocks = tiles * shape.cluster, places = static_cast<int64_t>(num_blocks) * device.num_multiprocessors;
  return 20 * blocks >= 19 * places && blocks <= places;
}

// Measured at K to N of 7168 to 4096 and 18432, 2048 and 18432 to 7168 (tests/cuda/run_int4.py). Of 1 to 64 rows, clusters of two
// or four blocks, each with few segments and long copies, were the fastest, with three exceptions. Where twice as many tiles of
// half the rows just fill the multiprocessors, they were faster by 10 to 25 % (7168 to 4096: 16 rows 11.7 us where 13.1, 32 rows
// 14.2 where 19, 64 rows 20.7 where 25.9). Short K (2048) has no use for long stages, and wants the segments side by side at 32
// rows (8.2 us where 9.1). And 32 rows of N = 18432 by 128 blocks of 144 outputs (42 us where 46): others come in waves.
int choose_int4_shape(const LinearArgs& a, const LinearDevice& device) {
  const int64_t m = a.num_rows;
  const bool clusters = device.clusters, wgmma = clusters && device.wgmma, is_long = a.num_in >= 4096;
  const bool is_large = a.num_in * a.num_out * a.num_groups >= 64'000'000;
  if (m <= 8) return !clusters ? k8 : is_long ? k8Long : k8Short;
  if (m <= 16) {
    if (!clusters) return k16;
    return is_long && blocks_of_each(a, device, k8Wide, 1) ? k8Wide : k16Pairs;
  }
  if (m <= 32) {
    if (is_large && blocks_of_each(a, device, k32Even, 1)) return k32Even;
    if (!clusters) return k32;
    if (!is_long) return k32Short;
    return blocks_of_each(a, device, k16Pairs, 2) ? k16Pairs : k32Fours;
  }
  if (m <= 64) {
    if (wgmma) return is_long && blocks_of_each(a, device, k32Wgmma, 1) ? k32Wgmma : k64Wgmma;
    return clusters ? k64Pairs : k64;
  }
  if (!wgmma) return k128;
  return m <= 128 && !is_large ? k64WgmmaPairs : k128Wgmma;
}

}  // namespace kdtree
