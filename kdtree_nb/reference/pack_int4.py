"""pack_int4: INT4 weights in the order in which tensor cores read them."""

from __future__ import annotations

import numpy as np

COLUMN, TILE, UNIT = 64, 16, 32
"""Outputs of a column and of a tile, inputs of a unit."""


def pack_int4(weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """weight i32 [G, N, K/8], scale, the bits of BF16 as u16 [G, N, K/group] -> u8 [G, ceil(N/64), K/32, 4, 288].

    A block of 288 bytes holds 16 outputs x 32 inputs. Its 64 words are [out 8][pair 4][half 2]. A word has, from the
    lowest nibble up, the values + 8 of (out, in), (out + 8, in), (out, in + 8), (out + 8, in + 8), where in is
    16 half + 2 pair, then those of in + 1. Behind the words: the scales of out and out + 8, for each of the 8.
    Past N values and scales are 0. Raises ValueError for groups that are not whole units.
    """
    groups, num_out, num_words = weight.shape
    num_in, num_scales = 8 * num_words, scale.shape[-1]
    if num_scales == 0 or num_in % num_scales or num_in // num_scales % UNIT:
        raise ValueError(f"pack_int4: expected groups of a multiple of {UNIT} inputs, got {num_scales} of {num_in}")
    columns, units = -(-num_out // COLUMN), num_in // UNIT
    digit = np.full((groups, columns * COLUMN, num_in), 8, np.uint32)
    nibbles = weight.astype(np.int64)[..., None] >> (4 * np.arange(8)) & 15
    digit[:, :num_out] = nibbles.reshape(groups, num_out, num_in)
    wide = np.zeros((groups, columns * COLUMN, units), np.uint16)
    wide[:, :num_out] = np.repeat(scale, units // num_scales, axis=-1)
    # [G, column, tile, lower or upper 8 outputs, out, unit, half, 8 inputs further on, pair, which of the pair] becomes
    # [G, column, unit, tile, out, pair, half; which, further on, upper]
    digit = digit.reshape(groups, columns, 4, 2, 8, units, 2, 2, 4, 2).transpose(0, 1, 5, 2, 4, 8, 6, 9, 7, 3)
    word = (digit.reshape(-1, 8) << (4 * np.arange(8, dtype=np.uint32))).sum(axis=1, dtype=np.uint32)
    values = word.astype("<u4").view(np.uint8).reshape(groups, columns, units, 4, 256)
    pairs = wide.reshape(groups, columns, 4, 2, 8, units).transpose(0, 1, 5, 2, 4, 3)
    scales = np.ascontiguousarray(pairs).astype("<u2").view(np.uint8).reshape(groups, columns, units, 4, 32)
    return np.concatenate([values, scales], axis=-1)
