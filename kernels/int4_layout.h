// Where the values and scales of packed INT4 weights lie (PackInt4Args), for both devices.
//
// Columns of 64 outputs, units of 32 inputs. The unit of a column is contiguous: a block of 288 bytes for each of its four
// tiles of 16 outputs. A block begins with 64 words, two for each lane of a warp: the 16 values that the lane holds of the A
// matrices of two products m16n8k16, so that it needs one load and no exchange. Then come 16 BF16 scales.
#pragma once
#include <stdint.h>

#include "dequantize_int4.h"

namespace kdtree {

constexpr int kInt4Tile = 16, kInt4Unit = 32, kInt4ColumnTiles = 4, kInt4ColumnOut = kInt4Tile * kInt4ColumnTiles;
constexpr int kInt4ValueWords = 64, kInt4BlockWords = 72, kInt4BlockBytes = 4 * kInt4BlockWords;

// Value i (of 8) of word w lies at bit int4_shift(i), as value + 8: two values that are multiplied as a pair are 16 bits apart.
KDTREE_BOTH int int4_shift(int i) { return 16 * (i % 2) + 4 * (i / 2); }

// Which of the block's 16 outputs and 32 inputs it is.
KDTREE_BOTH int int4_out(int w, int i) { return w / 8 + 8 * (i / 2 % 2); }
KDTREE_BOTH int int4_in(int w, int i) { return 16 * (w % 2) + 8 * (i / 4) + 2 * (w / 2 % 4) + i % 2; }

// The word and value of an output and input, and the 16-bit place of an output's scale, all of a block.
KDTREE_BOTH int int4_word(int out, int in) { return 8 * (out % 8) + 2 * (in % 8 / 2) + in / 16; }
KDTREE_BOTH int int4_value(int out, int in) { return 4 * (in % 16 / 8) + 2 * (out / 8) + in % 2; }
KDTREE_BOTH int int4_scale_place(int out) { return 2 * kInt4ValueWords + 2 * (out % 8) + out / 8; }

KDTREE_BOTH int64_t int4_num_columns(int64_t num_out) { return (num_out + kInt4ColumnOut - 1) / kInt4ColumnOut; }
KDTREE_BOTH int64_t int4_num_blocks(int64_t num_out, int64_t num_in) {  // of a group
  return int4_num_columns(num_out) * (num_in / kInt4Unit) * kInt4ColumnTiles;
}

}  // namespace kdtree
