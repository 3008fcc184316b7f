// pack_int4 on CUDA: a thread makes a word of a block, eight values or two scales.
#include "cuda_common.cuh"
#include "int4_layout.h"

namespace kdtree {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) pack_int4_kernel(PackInt4Args a, int64_t num_words) {
  const int64_t num_units = a.num_in / kInt4Unit, num_columns = int4_num_columns(a.num_out);
  const int64_t words_per_row = a.num_in / kInt4PerWord, scales_per_row = a.num_in / a.group_size;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < num_words; i += int64_t{kThreads} * gridDim.x) {
    const int w = i % kInt4BlockWords;
    const int64_t block = i / kInt4BlockWords, in_units = block / kInt4ColumnTiles, unit = in_units % num_units;
    const int64_t column = in_units / num_units % num_columns, group = in_units / num_units / num_columns;
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
        const int64_t n = first_out + w - kInt4ValueWords + 8 * half;
        const int64_t at = (group * a.num_out + n) * scales_per_row + unit * kInt4Unit / a.group_size;
        if (n < a.num_out) word |= uint32_t(a.scale[at]) << (16 * half);
      }
    }
    reinterpret_cast<uint32_t*>(a.packed)[i] = word;
  }
}

}  // namespace

int pack_int4_cuda(const PackInt4Args& a, void* stream) {
  if (a.group_size < 1 || a.group_size % kInt4Unit || a.num_in % a.group_size) return kUnsupported;
  const int64_t num_words = a.num_groups * int4_num_blocks(a.num_out, a.num_in) * kInt4BlockWords;
  if (num_words == 0) return kOk;
  LaunchShape shape;
  shape.block = dim3(kThreads);
  shape.grid = dim3(static_cast<unsigned>(std::min<int64_t>(ceil_div(num_words, kThreads), 1 << 20)));
  return launch(pack_int4_kernel, shape, stream, a, num_words);
}

}  // namespace kdtree
