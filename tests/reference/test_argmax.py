"""argmax: ties and NaN."""

from __future__ import annotations

import numpy as np

from kdtree_nb.reference import argmax


def test_ties_nan_and_infinities():
    nan, inf = np.nan, np.inf
    rows = [
        [1, 3, 3, 2],
        [0, 0, 0, 0],
        [nan, 9, 1, 1],
        [1, 9, 1, nan],
        [-inf, -inf, -1, -inf],
        [-inf] * 4,
        [1, inf, 2, 3],
    ]
    assert argmax(np.array(rows)).tolist() == [1, 0, -1, -1, 2, 0, 1]
    assert argmax(np.zeros((0, 4))).shape == (0,) and argmax(np.zeros((2, 1))).dtype == np.int64
