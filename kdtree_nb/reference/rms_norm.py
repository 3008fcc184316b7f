"""rms_norm: divide each row by its root mean square."""

from __future__ import annotations

import numpy as np

from kdtree_nb.reference.precision import Rounding, exact


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float, rounding: Rounding = exact) -> np.ndarray:
    """x / sqrt(mean(x²) + eps) · weight, per row: x [T, D], weight [D] -> [T, D]."""
    mean_square = np.mean(x * x, axis=-1, keepdims=True)
    return rounding(x / np.sqrt(mean_square + eps) * weight)
