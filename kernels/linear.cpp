// linear: out[t, g] = W[g] x[t, g] (+ residual). Bound by the memory of the weights for few rows, by fma for many.
#include "dot_tile.h"
#include "int4_layout.h"
#include "op_args.h"
#include "parallel.h"
#include "rows_in_use.h"
#include "scratch.h"
#include "unpack_int4.h"

namespace kdtree {
namespace {

constexpr int64_t kChunkRows = 48;  // rows that pass over a panel of weights before the next panel is fetched

// Where one tile's results go: rows and the first output of the tile, in elements of `out`.
struct Target {
  const LinearArgs& args;
  int64_t row, group, first_out;

  template <class Out>
  void write(int64_t r, int b, Vec16 value, const Out*) const {
    const int64_t n = first_out + b * kLanes, count = args.num_out - n;
    const int64_t at = ((row + r) * args.num_groups + group) * args.num_out + n;
    if (args.residual) {
      const Out* residual = static_cast<const Out*>(args.residual) + at;
      value = rounded(value, residual) + load_first(residual, count);
    }
    store_first(value, static_cast<Out*>(args.out) + at, count);
  }
};

// `num_rows` rows, the first at target.row, times kBlocks neighbouring packed blocks.
template <int kBlocks, class Float>
void panel(const float* const* x, int64_t num_rows, const Float* weight, const Segments& segments,
           const Target& target) {
  for_row_tiles(num_rows, [&](int64_t begin, auto height) {
    tile_totals<height, kBlocks>(x + begin, weight, target.args.num_in, segments, [&](int r, int b, Vec16 total) {
      if (target.args.out_dtype == kF32)
        target.write(begin + r, b, total, static_cast<const float*>(nullptr));
      else
        target.write(begin + r, b, total, static_cast<const Bf16*>(nullptr));
    });
  });
}

// FP32 rows are read in place; BF16 rows are widened into scratch.
inline void point_at_rows(const float* x, int64_t stride, int64_t num_rows, int64_t, float*, const float** rows) {
  for (int64_t r = 0; r < num_rows; ++r) rows[r] = x + r * stride;
}

inline void point_at_rows(const Bf16* x, int64_t stride, int64_t num_rows, int64_t length, float* scratch,
                          const float** rows) {
  for (int64_t r = 0; r < num_rows; ++r) {
    float* out = scratch + r * length;
    for (int64_t k = 0; k < length; ++k) out[k] = widen(x[r * stride + k]);
    rows[r] = out;
  }
}

// Panels [begin, end) of all, counted over the groups in each chunk of kChunkRows rows.
template <class Float>
void linear_share(const LinearArgs& a, const Segments& segments, int64_t begin, int64_t end, float* scratch) {
  const int64_t blocks_per_group = num_blocks_of(a.num_out), panels_per_group = num_panels_of(blocks_per_group);
  const float* rows[kChunkRows];
  int64_t rows_of = -1;  // chunk and group that `rows` point at
  for (int64_t i = begin; i < end; ++i) {
    const int64_t in_chunks = i / panels_per_group, group = in_chunks % a.num_groups;
    const int64_t row = in_chunks / a.num_groups * kChunkRows, num_rows = std::min(kChunkRows, a.num_rows - row);
    if (in_chunks != rows_of) {
      const Float* x = static_cast<const Float*>(a.x) + row * a.x_row_stride + group * a.x_group_stride;
      point_at_rows(x, a.x_row_stride, num_rows, a.num_in, scratch, rows);
      rows_of = in_chunks;
    }
    const Panel at = panel_of(i % panels_per_group, blocks_per_group);
    const int64_t block = group * blocks_per_group + at.block;
    const Float* weight = static_cast<const Float*>(a.packed) + block * a.num_in * kLanes;
    const Target target{a, row, group, at.block * kLanes};
    with_panel_width(at.width, [&](auto blocks) { panel<blocks>(rows, num_rows, weight, segments, target); });
  }
}

inline SegmentShare share_of(const LinearArgs& a) { return {a.whole_in, a.first_segment, a.num_segments}; }

// The sum of no products.
void fill_zeros(const LinearArgs& a) {
  std::fill_n(static_cast<float*>(a.out), a.num_rows * a.num_groups * a.num_out, 0.0f);
}

template <class Float>
void linear(const LinearArgs& a) {
  const Segments segments(a.num_in, share_of(a));
  if (a.num_segments > 0 && segments.last() < 0) return fill_zeros(a);
  const int64_t num_blocks = a.num_groups * num_blocks_of(a.num_out);
  const int num_threads = threads_for(product_work(a.num_rows, num_blocks * kLanes * a.num_in), a.num_threads);
  const int64_t scratch_size = sizeof(Float) == 4 ? 0 : std::min(kChunkRows, a.num_rows) * a.num_in;
  const Floats scratch = new_floats(scratch_size * num_threads);
  const int64_t num_chunks = (a.num_rows + kChunkRows - 1) / kChunkRows;
  const int64_t num_panels = num_chunks * a.num_groups * num_panels_of(num_blocks_of(a.num_out));
  run_shares(num_threads, num_panels, [&](int64_t begin, int64_t end, int thread) {
    linear_share<Float>(a, segments, begin, end, scratch.get() + scratch_size * thread);
  });
}

// One packed block: 16 rows of the weight, turned into columns a few inputs at a time so that both stay in the cache.
template <class Float>
void pack_block(const PackLinearArgs& a, int64_t group, int64_t block, Float* out) {
  constexpr int64_t kStrip = 32;
  const Float* weight = static_cast<const Float*>(a.weight) + group * a.num_out * a.num_in;
  for (int64_t begin = 0; begin < a.num_in; begin += kStrip) {
    const int64_t end = std::min(begin + kStrip, a.num_in);
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const int64_t n = block * kLanes + lane;
      for (int64_t k = begin; k < end; ++k) out[k * kLanes + lane] = n < a.num_out ? weight[n * a.num_in + k] : Float{};
    }
  }
}

template <class Float>
void pack_linear(const PackLinearArgs& a) {
  const int64_t blocks_per_group = num_blocks_of(a.num_out), num_blocks = a.num_groups * blocks_per_group;
  const int64_t block_size = a.num_in * kLanes;
  run_tasks(threads_for(num_blocks * block_size, a.num_threads), num_blocks, [&](int64_t i, int) {
    Float* out = static_cast<Float*>(a.packed) + i * block_size;
    pack_block(a, i / blocks_per_group, i % blocks_per_group, out);
  });
}

}  // namespace

int linear_cpu(const LinearArgs& args) {
  LinearArgs a = with_rows_in_use(args);
  if (a.int4 && (a.dtype != kBF16 || a.num_in % kInt4Unit)) return kUnsupported;
  UnpackedInt4 unpacked;
  if (a.int4) {
    unpacked = unpack_int4(a.packed, a.num_groups, a.num_out, a.num_in, {}, a.num_threads);
    a.packed = unpacked.get(), a.int4 = false;
  }
  if (a.dtype == kF32 && a.out_dtype != kF32) return kUnsupported;
  if (a.residual && a.out_dtype != a.dtype) return kUnsupported;
  if (!share_of(a).fits(a.num_in) || (a.num_segments > 0 && (a.residual || a.out_dtype != kF32))) return kUnsupported;
  a.dtype == kF32 ? linear<float>(a) : linear<Bf16>(a);
  return kOk;
}

int pack_linear_cpu(const PackLinearArgs& a) {
  a.dtype == kF32 ? pack_linear<float>(a) : pack_linear<Bf16>(a);
  return kOk;
}

}  // namespace kdtree
