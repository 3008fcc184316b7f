"""residual_add: the sum of a block's output and its input."""

from __future__ import annotations

import numpy as np

from kdtree_nb.reference.precision import Rounding, exact


def residual_add(x: np.ndarray, y: np.ndarray, rounding: Rounding = exact) -> np.ndarray:
    """x + y, elementwise: two arrays [T, D] -> [T, D]."""
    return rounding(x + y)
