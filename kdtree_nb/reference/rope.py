"""rope: rotary position embedding in NeoX order (element i is paired with element i + R/2)."""

from __future__ import annotations

import numpy as np

from kdtree_nb.reference.precision import Rounding, exact


def rope_table(num_positions: int, dim: int, theta: float) -> np.ndarray:
    """Cosines and sines of every angle, float64 [P, R]: R/2 cosines, then R/2 sines, by absolute position.

    Pair i turns by position · theta^(-2i/R).
    """
    frequency = theta ** (-2.0 * np.arange(dim // 2) / dim)
    angle = np.arange(num_positions)[:, None] * frequency
    return np.concatenate([np.cos(angle), np.sin(angle)], axis=1)


def rope(x: np.ndarray, cos_sin: np.ndarray, position: np.ndarray, rounding: Rounding = exact) -> np.ndarray:
    """Rotate each pair of x [T, H, R] by its angle at position int [T], read from cos_sin [P, R] -> [T, H, R].

    Raises ValueError for a position outside the table.
    """
    position = np.asarray(position)
    outside = position[(position < 0) | (position >= len(cos_sin))]
    if outside.size:
        raise ValueError(f"rope: expected positions in 0 … {len(cos_sin) - 1}, got {outside[0]}")
    cos, sin = np.split(cos_sin[position][:, None, :], 2, axis=-1)
    first, second = np.split(x, 2, axis=-1)
    return rounding(np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1))
