"""dequantize_int4: the floats that packed INT4 weights stand for."""

from __future__ import annotations

import numpy as np

from kdtree_nb.reference.precision import Rounding, exact


def dequantize_int4(weight: np.ndarray, scale: np.ndarray, rounding: Rounding = exact) -> np.ndarray:
    """weight i32 [G, N, K/8], scale [G, N, K/group] -> [G, N, K]: (nibble - 8) · scale, nibbles from the lowest up.

    Raises ValueError for scales that do not divide the inputs into groups.
    """
    groups, num_out, num_words = weight.shape
    num_in, num_scales = 8 * num_words, scale.shape[-1]
    if num_scales == 0 or num_in % num_scales or num_in // num_scales % 8:
        raise ValueError(f"dequantize_int4: expected groups of a multiple of 8 inputs, got {num_scales} of {num_in}")
    unsigned = weight.astype(np.int64) & 0xFFFFFFFF
    digits = [unsigned // 16**i % 16 for i in range(8)]
    value = np.stack(digits, axis=-1).reshape(groups, num_out, num_in) - 8
    wide = np.repeat(scale, num_in // num_scales, axis=-1)
    return rounding(value * wide)
