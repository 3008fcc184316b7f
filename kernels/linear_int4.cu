// The tile shapes of linear and moe_experts with INT4 weights: those of linear_tile.cuh, whose consumer warps turn the values
// into BF16 in registers. Any shape gives the same bits, those of the BF16 weights that dequantize_int4 makes.
#include <initializer_list>

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
// a multiprocessor. The first index of those for 8, 16, 32, 64 and 128 rows:
enum Int4Shape : int { k8 = 0, k16 = 17, k32 = 27, k64 = 39, k128 = 49, kNumInt4Shapes = 52 };
constexpr LinearShape kShapes[kNumInt4Shapes] = {
    KDTREE_INT4(8, 1, 4, 1, 1, 1, 1, 2),        // 64 outputs
    with_swiglu<8, 1, 8, 1, 1>(KDTREE_INT4_BESIDE(8, 1, 8, 1, 1, 1, 1, 2)),  // 128
    KDTREE_INT4(8, 1, 2, 1, 2, 1, 1, 2),        // 32
    KDTREE_INT4(4, 2, 4, 1, 1, 2, 1, 2),        // 128, two segments in sequence
    with_swiglu<2, 4, 2, 2, 4>(KDTREE_INT4_BESIDE(4, 2, 2, 1, 2, 1, 2, 2)),  // 64, two blocks share them
    KDTREE_INT4(2, 4, 4, 1, 1, 4, 1, 2),        // 256
    KDTREE_INT4(8, 1, 4, 1, 1, 1, 1, 3),        // 64, three blocks of a multiprocessor
    KDTREE_INT4(2, 4, 1, 1, 2, 1, 4, 2),        // 64, four blocks share them
    KDTREE_INT4(4, 3, 3, 1, 2, 2, 1, 1),        // 144: one block a multiprocessor, 128 blocks of 18432
    KDTREE_INT4(8, 3, 3, 1, 1, 1, 1, 1),
    KDTREE_INT4(4, 3, 3, 1, 4, 2, 1, kWholeSm),
    KDTREE_INT4(2, 7, 1, 1, 4, 2, 2, 1),        // 112, two blocks: 128 blocks of 7168
    KDTREE_INT4(4, 7, 1, 1, 2, 1, 2, 1),
    KDTREE_INT4(2, 7, 2, 1, 2, 1, 4, 1),        // 224, four blocks
    KDTREE_INT4(4, 4, 4, 1, 1, 2, 1, 1),         // 256
    KDTREE_INT4(4, 2, 2, 1, 4, 1, 2, 2),         // 64, two blocks, stages of four units
    KDTREE_INT4(4, 4, 2, 1, 2, 1, 2, 1),        // 128, two blocks
    KDTREE_INT4(8, 1, 4, 2, 1, 1, 1, 2),        // 16 rows: 64
    KDTREE_INT4(4, 2, 4, 2, 1, 2, 1, 2),        // 128
    KDTREE_INT4(4, 2, 2, 2, 2, 1, 2, 2),        // 64, two blocks
    KDTREE_INT4(8, 1, 2, 2, 1, 1, 1, 2),        // 32
    KDTREE_INT4(4, 3, 3, 2, 2, 2, 1, 1),        // 144
    KDTREE_INT4(8, 3, 3, 2, 1, 1, 1, 1),
    KDTREE_INT4(4, 3, 3, 2, 2, 2, 1, kWholeSm),
    KDTREE_INT4(2, 7, 1, 2, 4, 2, 2, 1),        // 112, two blocks
    KDTREE_INT4(4, 7, 1, 2, 2, 1, 2, 1),
    KDTREE_INT4(2, 7, 2, 2, 2, 1, 4, 1),        // 224, four blocks
    KDTREE_INT4(4, 2, 2, 4, 1, 2, 1, 2),        // 32 rows: 64
    KDTREE_INT4(4, 2, 2, 4, 1, 1, 2, 2),        // 64, two blocks
    KDTREE_INT4(2, 4, 2, 4, 1, 4, 1, 2),        // 128
    KDTREE_INT4(2, 4, 2, 4, 2, 1, 4, 2),        // 128, four blocks
    KDTREE_INT4(8, 1, 2, 4, 1, 1, 1, 2),        // 32
    KDTREE_INT4_WGMMA(2, 4, 1, 4, 2, 4, 1, 2),  // 64
    KDTREE_INT4_WGMMA(2, 8, 1, 4, 2, 2, 2, 1),  // 128, two blocks
    KDTREE_INT4(4, 3, 3, 4, 1, 2, 1, 1),        // 144
    KDTREE_INT4(4, 3, 3, 4, 2, 2, 1, kWholeSm),
    KDTREE_INT4(2, 7, 1, 4, 2, 2, 2, 1),        // 112, two blocks
    KDTREE_INT4(2, 7, 2, 4, 2, 1, 4, 1),        // 224, four blocks
    KDTREE_INT4_WGMMA(1, 12, 1, 4, 2, 2, 4, 2),  // 192, four blocks
    KDTREE_INT4(2, 4, 2, 8, 1, 4, 1, 1),        // 64 rows: 128
    KDTREE_INT4(2, 4, 2, 8, 1, 2, 2, 1),        // 128, two blocks
    KDTREE_INT4_WGMMA(1, 8, 1, 8, 2, 8, 1, 2),  // 128
    KDTREE_INT4_WGMMA(1, 8, 1, 8, 2, 4, 2, 2),  // 128, two blocks
    KDTREE_INT4_WGMMA(1, 8, 1, 8, 2, 2, 4, 2),  // 128, four blocks
    KDTREE_INT4_WGMMA(2, 4, 1, 8, 2, 1, 4, 2),  // 64, four blocks
    KDTREE_INT4(2, 3, 3, 8, 1, 4, 1, 1),        // 144
    KDTREE_INT4(1, 7, 2, 8, 2, 2, 4, 1),        // 224, four blocks
    KDTREE_INT4_WGMMA(1, 12, 1, 8, 1, 2, 4, 2),  // 192, four blocks
    KDTREE_INT4_WGMMA(1, 16, 1, 8, 2, 4, 2, 1),  // 256, two blocks
    KDTREE_INT4(1, 8, 1, 16, 1, 8, 1, 1),       // 128 rows: 128
    KDTREE_INT4_WGMMA(1, 8, 1, 16, 2, 8, 1, 1),  // 128
    KDTREE_INT4_WGMMA(1, 8, 1, 16, 2, 2, 4, 1),  // 128, four blocks
};

constexpr bool begins(int index, int num_rows) {
  return kShapes[index].num_rows == num_rows && (index == 0 || kShapes[index - 1].num_rows < num_rows);
}
static_assert(begins(k8, 8) && begins(k16, 16) && begins(k32, 32) && begins(k64, 64) && begins(k128, 128), "Int4Shape");

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
  return {device.clusters && blocks < device.num_multiprocessors ? k8 + 4 : k8 + 1, share ? 10 : 1};
}

int num_int4_shapes() { return kNumInt4Shapes; }

const LinearShape& int4_shape(int index) { return kShapes[index]; }

// Of the candidates the first that gives every multiprocessor one block; -1 if none does.
static int one_block_each(const LinearArgs& a, const LinearDevice& device, std::initializer_list<int> candidates) {
  for (const int i : candidates) {
    const int64_t blocks = ceil_div(a.num_out, kShapes[i].num_out) * kShapes[i].cluster * a.num_groups;
    const bool fills = 20 * blocks >= 19 * device.num_multiprocessors && blocks <= device.num_multiprocessors;
    if (fills && serves(kShapes[i], a, device)) return i;
  }
  return -1;
}

// Of many weights, blocks of as many outputs as make one for every multiprocessor: others come in waves, and with N = 18432 the
// last of 2.2 or 1.1 leaves most of the device idle. Else blocks that share a tile were the fastest for any number of rows,
// measured at four sizes (tests/cuda/run_int4.py).
int choose_int4_shape(const LinearArgs& a, const LinearDevice& device) {
  const bool clusters = device.clusters, wgmma = clusters && device.wgmma;
  if (a.num_in * a.num_out * a.num_groups >= 64'000'000) {
    const int shape = a.num_rows <= 8    ? one_block_each(a, device, {k8 + 8, k8 + 11})
                      : a.num_rows <= 16 ? one_block_each(a, device, {k16 + 4, k16 + 7})
                      : a.num_rows <= 32 ? one_block_each(a, device, {k32 + 7, k32 + 9})
                      : a.num_rows <= 64 ? one_block_each(a, device, {k64 + 6, k64 + 7}) : -1;
    if (shape >= 0) return shape;
  }
  if (a.num_rows <= 8) return clusters ? k8 + 4 : k8;
  if (a.num_rows <= 16) return clusters ? k16 + 2 : k16;
  if (a.num_rows <= 32) return clusters ? k32 + 3 : k32;
  if (a.num_rows <= 64) return wgmma ? k64 + 4 : clusters ? k64 + 1 : k64;
  return wgmma ? k128 + 2 : k128;
}

}  // namespace kdtree
