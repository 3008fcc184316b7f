// pack_int4 on CUDA, and the tile shapes of linear with INT4 weights: those of linear_tile.cuh, whose consumer warps turn the
// values into BF16 in registers. Any shape gives the same bits, those of linear with the BF16 weights they stand for.
#include "linear.cuh"
#include "linear_tile.cuh"

namespace kdtree {
namespace {

using Bf16 = __nv_bfloat16;

// --- pack ------------------------------------------------------------------------------------------------------------

// A thread makes a word of a block: eight values, or two scales.
__global__ void pack_int4_kernel(PackInt4Args a, int64_t num_words) {
  const int64_t num_units = a.num_in / kInt4Unit, num_scales = a.num_in / a.group_size, words_per_row = a.num_in / kInt4PerWord;
  const int64_t num_columns = int4_num_columns(a.num_out);
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < num_words; i += gridDim.x * int64_t(blockDim.x)) {
    const int w = i % kInt4BlockWords;
    const int64_t block = i / kInt4BlockWords, unit = block / kInt4ColumnTiles % num_units;
    const int64_t column = block / kInt4ColumnTiles / num_units % num_columns, group = block / kInt4ColumnTiles / num_units / num_columns;
    const int64_t first_out = (column * kInt4ColumnTiles + block % kInt4ColumnTiles) * kInt4Tile;
    uint32_t word = 0;
    if (w < kInt4ValueWords) {
      for (int v = 0; v < kInt4PerWord; ++v) {
        const int64_t n = first_out + int4_out(w, v), k = unit * kInt4Unit + int4_in(w, v);
        const int value = n < a.num_out ? int4_at(a.weight + (group * a.num_out + n) * words_per_row, k) : 0;
        word |= uint32_t(value + 8) << int4_shift(v);
      }
    } else {
      for (int half = 0; half < 2; ++half) {
        const int64_t n = first_out + (w - kInt4ValueWords) + 8 * half, at = unit * kInt4Unit / a.group_size;
        const uint16_t* scale = static_cast<const uint16_t*>(a.scale) + (group * a.num_out + n) * num_scales;
        if (n < a.num_out) word |= uint32_t(scale[at]) << (16 * half);
      }
    }
    static_cast<uint32_t*>(a.packed)[i] = word;
  }
}

// --- tile shapes -----------------------------------------------------------------------------------------------------

template <TileKind Kind, bool Partials, int SegWarps, int OutWarps, int OutTiles, int RowTiles, int Units, int Seq, int Cluster,
          int MinBlocks>
constexpr LinearShape describe(const char* name) {
  using S = TileShape<Bf16, SegWarps, OutWarps, 1, OutTiles, RowTiles, Units, Seq, Cluster, MinBlocks, Partials, Kind>;
  return {name, S::kBlockRows, S::kBlockOut, S::kCluster, S::kWgmma, launch_tile<S>};
}
#define KDTREE_INT4(...) describe<kInt4, false, __VA_ARGS__>("int4, " #__VA_ARGS__)
#define KDTREE_INT4_WGMMA(...) describe<kInt4Wgmma, false, __VA_ARGS__>("int4 wgmma, " #__VA_ARGS__)
#define KDTREE_INT4_PARTS(...) describe<kInt4, true, __VA_ARGS__>("int4 segments, " #__VA_ARGS__)

// Warps over segments, outputs; 16-output and 8-row tiles of a warp; units of a stage; segments in sequence; cluster; blocks of
// a multiprocessor. The first index of those for 8, 16, 32, 64 and 128 rows:
enum Int4Shape : int { k8 = 0, k16 = 8, k32 = 12, k64 = 19, k128 = 25, kNumInt4Shapes = 28 };
constexpr LinearShape kShapes[kNumInt4Shapes] = {
    KDTREE_INT4(8, 1, 4, 1, 1, 1, 1, 2),        // 64 outputs
    KDTREE_INT4(8, 1, 8, 1, 1, 1, 1, 2),        // 128
    KDTREE_INT4(8, 1, 2, 1, 2, 1, 1, 2),        // 32
    KDTREE_INT4(4, 2, 4, 1, 1, 2, 1, 2),        // 128, two segments in sequence
    KDTREE_INT4(4, 2, 2, 1, 2, 1, 2, 2),        // 64, two blocks share them
    KDTREE_INT4(2, 4, 4, 1, 1, 4, 1, 2),        // 256
    KDTREE_INT4(8, 1, 4, 1, 1, 1, 1, 3),        // 64, three blocks of a multiprocessor
    KDTREE_INT4(2, 4, 1, 1, 2, 1, 4, 2),        // 64, four blocks share them
    KDTREE_INT4(8, 1, 4, 2, 1, 1, 1, 2),        // 16 rows: 64
    KDTREE_INT4(4, 2, 4, 2, 1, 2, 1, 2),        // 128
    KDTREE_INT4(4, 2, 2, 2, 2, 1, 2, 2),        // 64, two blocks
    KDTREE_INT4(8, 1, 2, 2, 1, 1, 1, 2),        // 32
    KDTREE_INT4(4, 2, 2, 4, 1, 2, 1, 2),        // 32 rows: 64
    KDTREE_INT4(4, 2, 2, 4, 1, 1, 2, 2),        // 64, two blocks
    KDTREE_INT4(2, 4, 2, 4, 1, 4, 1, 2),        // 128
    KDTREE_INT4(2, 4, 2, 4, 2, 1, 4, 2),        // 128, four blocks
    KDTREE_INT4(8, 1, 2, 4, 1, 1, 1, 2),        // 32
    KDTREE_INT4_WGMMA(2, 4, 1, 4, 2, 4, 1, 2),  // 64
    KDTREE_INT4_WGMMA(2, 8, 1, 4, 2, 2, 2, 1),  // 128, two blocks
    KDTREE_INT4(2, 4, 2, 8, 1, 4, 1, 1),        // 64 rows: 128
    KDTREE_INT4(2, 4, 2, 8, 1, 2, 2, 1),        // 128, two blocks
    KDTREE_INT4_WGMMA(1, 8, 1, 8, 2, 8, 1, 2),  // 128
    KDTREE_INT4_WGMMA(1, 8, 1, 8, 2, 4, 2, 2),  // 128, two blocks
    KDTREE_INT4_WGMMA(1, 8, 1, 8, 2, 2, 4, 2),  // 128, four blocks
    KDTREE_INT4_WGMMA(2, 4, 1, 8, 2, 1, 4, 2),  // 64, four blocks
    KDTREE_INT4(1, 8, 1, 16, 2, 8, 1, 1),       // 128 rows: 128
    KDTREE_INT4_WGMMA(1, 8, 1, 16, 2, 8, 1, 1),  // 128
    KDTREE_INT4_WGMMA(1, 8, 1, 16, 2, 2, 4, 1),  // 128, four blocks
};

// Those that leave the segment sums of an expert's down projection apart, for 8, 32 and 64 rows.
constexpr LinearShape kPartialShapes[] = {
    KDTREE_INT4_PARTS(8, 1, 4, 1, 1, 1, 1, 2), KDTREE_INT4_PARTS(8, 1, 8, 1, 1, 1, 1, 2), KDTREE_INT4_PARTS(4, 2, 4, 1, 1, 1, 2, 2),
    KDTREE_INT4_PARTS(8, 1, 4, 1, 1, 1, 1, 3), KDTREE_INT4_PARTS(2, 4, 4, 1, 1, 1, 4, 2), KDTREE_INT4_PARTS(4, 2, 2, 4, 1, 1, 2, 2),
    KDTREE_INT4_PARTS(2, 4, 2, 4, 2, 1, 4, 2), KDTREE_INT4_PARTS(2, 4, 2, 8, 1, 1, 4, 1),
};

}  // namespace

int num_int4_partial_shapes() { return sizeof(kPartialShapes) / sizeof(kPartialShapes[0]); }

const LinearShape& int4_partial_shape(int index) { return kPartialShapes[index]; }

Int4ExpertShapes choose_int4_experts(int rows_per_item) {
  return rows_per_item == 8 ? Int4ExpertShapes{k8, 0} : rows_per_item == 32 ? Int4ExpertShapes{k32, 5} : Int4ExpertShapes{k64, 7};
}

int num_int4_shapes() { return kNumInt4Shapes; }

const LinearShape& int4_shape(int index) { return kShapes[index]; }

// With few blocks, those that share a tile among several; on Hopper wgmma from 64 rows on.
int choose_int4_shape(const LinearArgs& a, const LinearDevice& device) {
  const int64_t blocks = ceil_div(a.num_out, 64) * a.num_groups;  // of 64 outputs
  const bool fills = blocks >= device.num_multiprocessors || !device.clusters;
  if (a.num_rows <= 8) return fills ? k8 : k8 + 4;
  if (a.num_rows <= 16) return fills ? k16 : k16 + 2;
  if (a.num_rows <= 32) return fills ? k32 : k32 + 1;
  if (!device.wgmma) return a.num_rows <= 64 ? k64 : k128;
  if (a.num_rows <= 64) return fills ? k64 + 3 : k64 + 5;
  return blocks * ceil_div(a.num_rows, 128) >= 2 * device.num_multiprocessors ? k128 + 1 : k128 + 2;
}

int pack_int4_cuda(const PackInt4Args& a, void* stream) {
  if (a.group_size < 1 || a.group_size % kInt4Unit || a.num_in % a.group_size) return kUnsupported;
  const int64_t num_words = a.num_groups * int4_num_blocks(a.num_out, a.num_in) * kInt4BlockWords;
  if (num_words == 0) return kOk;
  LaunchShape shape;
  shape.block = dim3(256);
  shape.grid = dim3(static_cast<unsigned>(std::min<int64_t>(ceil_div(num_words, 256), 1 << 20)));
  return launch(pack_int4_kernel, shape, stream, a, num_words);
}

}  // namespace kdtree
