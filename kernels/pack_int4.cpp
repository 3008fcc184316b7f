// pack_int4, and the way back for the products on a CPU.
#include <cstring>

#include "bf16.h"
#include "int4_layout.h"
#include "op_args.h"
#include "parallel.h"
#include "unpack_int4.h"

namespace kdtree {
namespace {

constexpr int64_t kUnitBytes = kInt4ColumnTiles * kInt4BlockBytes;  // of a column

// The unit of a column: 64 outputs x 32 inputs.
void pack_unit(const PackInt4Args& a, int64_t group, int64_t column, int64_t unit, uint8_t* packed) {
  const int64_t words_per_row = a.num_in / kInt4PerWord, scales_per_row = a.num_in / a.group_size;
  uint32_t words[kInt4ColumnTiles][kInt4BlockWords] = {};
  for (int out = 0; out < kInt4ColumnOut; ++out) {
    const int64_t n = column * kInt4ColumnOut + out, row = group * a.num_out + n;
    const bool exists = n < a.num_out;
    uint32_t* block = words[out / kInt4Tile];
    for (int k = 0; k < kInt4Unit; ++k) {
      const int value = exists ? int4_at(a.weight + row * words_per_row, unit * kInt4Unit + k) : 0;
      block[int4_word(out % kInt4Tile, k)] |= uint32_t(value + 8) << int4_shift(int4_value(out % kInt4Tile, k));
    }
    const uint32_t scale = exists ? a.scale[row * scales_per_row + unit * kInt4Unit / a.group_size] : 0;
    const int place = int4_scale_place(out % kInt4Tile);
    block[place / 2] |= scale << (16 * (place % 2));
  }
  std::memcpy(packed, words, sizeof words);
}

// A tile of 16 outputs x 32 inputs as [k 32][n 16] BF16.
void unpack_block(const uint8_t* packed, Bf16* out) {
  uint32_t words[kInt4BlockWords];
  std::memcpy(words, packed, sizeof words);
  for (int n = 0; n < kInt4Tile; ++n) {
    const int place = int4_scale_place(n);
    const float scale = widen(Bf16{uint16_t(words[place / 2] >> (16 * (place % 2)))});
    for (int k = 0; k < kInt4Unit; ++k) {
      const uint32_t digit = words[int4_word(n, k)] >> int4_shift(int4_value(n, k)) & 15u;
      out[k * kInt4Tile + n] = round_bf16(float(int(digit) - 8) * scale);
    }
  }
}

}  // namespace

int pack_int4_cpu(const PackInt4Args& a) {
  if (a.group_size < 1 || a.group_size % kInt4Unit || a.num_in % a.group_size) return kUnsupported;
  const int64_t num_units = a.num_in / kInt4Unit, num_columns = int4_num_columns(a.num_out);
  const int64_t num_tasks = a.num_groups * num_columns * num_units;
  run_shares(threads_for(num_tasks * kUnitBytes, a.num_threads), num_tasks, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i)
      pack_unit(a, i / num_units / num_columns, i / num_units % num_columns, i % num_units, a.packed + i * kUnitBytes);
  });
  return kOk;
}

UnpackedInt4 unpack_int4(const void* packed, int64_t num_groups, int64_t num_out, int64_t num_in,
                         const std::vector<bool>& is_wanted, int num_threads) {
  const int64_t num_units = num_in / kInt4Unit, num_columns = int4_num_columns(num_out);
  const int64_t num_tiles = (num_out + kInt4Tile - 1) / kInt4Tile, tile_size = num_in * kInt4Tile;
  UnpackedInt4 out(new Bf16[num_groups * num_tiles * tile_size]);
  run_tasks(threads_for(num_groups * num_tiles * tile_size, num_threads), num_groups * num_tiles, [&](int64_t i, int) {
    const int64_t group = i / num_tiles, tile = i % num_tiles;
    if (!is_wanted.empty() && !is_wanted[group]) return;
    for (int64_t unit = 0; unit < num_units; ++unit) {
      const int64_t block = ((group * num_columns + tile / kInt4ColumnTiles) * num_units + unit) * kInt4ColumnTiles;
      unpack_block(static_cast<const uint8_t*>(packed) + (block + tile % kInt4ColumnTiles) * kInt4BlockBytes,
                   out.get() + i * tile_size + unit * kInt4Unit * kInt4Tile);
    }
  });
  return out;
}

}  // namespace kdtree
