// linear: out[t, g] = W[g] x[t, g] (+ residual). Bound by the memory of the weights for few rows, by fma for many.
#include "dot_tile.h"
#include "op_args.h"
#include "parallel.h"
#include "scratch.h"

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

// One thread's share: rows [row_begin, row_end) times packed blocks [block_begin, block_end), counted over all groups.
template <class Float>
void linear_share(const LinearArgs& a, const Segments& segments, int64_t row_begin, int64_t row_end,
                  int64_t block_begin, int64_t block_end, float* scratch) {
  const int64_t blocks_per_group = num_blocks_of(a.num_out);
  const float* rows[kChunkRows];
  for (int64_t row = row_begin; row < row_end; row += kChunkRows) {
    const int64_t num_rows = std::min(kChunkRows, row_end - row);
    int64_t group_in_rows = -1;
    for (int64_t block = block_begin; block < block_end;) {
      const int64_t group = block / blocks_per_group, in_group = block % blocks_per_group;
      if (group != group_in_rows) {
        const Float* x = static_cast<const Float*>(a.x) + row * a.x_row_stride + group * a.x_group_stride;
        point_at_rows(x, a.x_row_stride, num_rows, a.num_in, scratch, rows);
        group_in_rows = group;
      }
      const int64_t left = std::min(block_end - block, blocks_per_group - in_group);
      const Float* weight = static_cast<const Float*>(a.packed) + block * a.num_in * kLanes;
      const Target target{a, row, group, in_group * kLanes};
      const int width = panel_width(left);
      with_panel_width(width, [&](auto blocks) { panel<blocks>(rows, num_rows, weight, segments, target); });
      block += width;
    }
  }
}

template <class Float>
void linear(const LinearArgs& a) {
  const Segments segments(a.num_in);
  const int64_t num_blocks = a.num_groups * num_blocks_of(a.num_out);
  const int num_threads = threads_for(product_work(a.num_rows, num_blocks * kLanes * a.num_in), a.num_threads);
  const int64_t scratch_size = sizeof(Float) == 4 ? 0 : std::min(kChunkRows, a.num_rows) * a.num_in;
  const Floats scratch = new_floats(scratch_size * num_threads);
  const bool by_rows = num_blocks < 2 * num_threads && a.num_rows >= num_threads * kTileRows;
  run_threads(num_threads, [&](int thread) {
    const auto share = [&](int64_t count, int i) { return count * i / num_threads; };
    float* own = scratch.get() + scratch_size * thread;
    if (by_rows)
      linear_share<Float>(a, segments, share(a.num_rows, thread), share(a.num_rows, thread + 1), 0, num_blocks, own);
    else
      linear_share<Float>(a, segments, 0, a.num_rows, share(num_blocks, thread), share(num_blocks, thread + 1), own);
  });
}

template <class Float>
void pack_linear(const PackLinearArgs& a) {
  const int64_t blocks_per_group = num_blocks_of(a.num_out);
  const Float* weight = static_cast<const Float*>(a.weight);
  Float* out = static_cast<Float*>(a.packed);
  for (int64_t g = 0; g < a.num_groups; ++g)
    for (int64_t block = 0; block < blocks_per_group; ++block)
      for (int64_t k = 0; k < a.num_in; ++k)
        for (int64_t lane = 0; lane < kLanes; ++lane, ++out) {
          const int64_t n = block * kLanes + lane;
          *out = n < a.num_out ? weight[(g * a.num_out + n) * a.num_in + k] : Float{};
        }
}

}  // namespace

int linear_cpu(const LinearArgs& a) {
  if (a.dtype == kF32 && a.out_dtype != kF32) return kUnsupported;
  if (a.residual && a.out_dtype != a.dtype) return kUnsupported;
  a.dtype == kF32 ? linear<float>(a) : linear<Bf16>(a);
  return kOk;
}

int pack_linear_cpu(const PackLinearArgs& a) {
  a.dtype == kF32 ? pack_linear<float>(a) : pack_linear<Bf16>(a);
  return kOk;
}

}  // namespace kdtree
