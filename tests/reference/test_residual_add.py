"""residual_add: a sum and its rounding."""

from __future__ import annotations

import numpy as np

from kdtree_nb.reference import residual_add, round_bf16


def test_sum():
    x, y = np.float32([[1.0, 256.0]]), np.float32([[2.0, 1.0]])
    assert residual_add(x, y).tolist() == [[3.0, 257.0]]
    assert residual_add(x, y, round_bf16).tolist() == [[3.0, 256.0]]  # 257 lies between 256 and 258: even wins
