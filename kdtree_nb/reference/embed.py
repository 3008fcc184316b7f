"""embed: the rows of a table."""

from __future__ import annotations

import numpy as np


def embed(weight: np.ndarray, token: np.ndarray) -> np.ndarray:
    """Rows `weight[token]`: weight [V, D], token int [T] -> [T, D]. Raises ValueError for an id outside 0 … V-1."""
    token = np.asarray(token)
    outside = token[(token < 0) | (token >= len(weight))]
    if outside.size:
        raise ValueError(f"embed: expected token ids in 0 … {len(weight) - 1}, got {outside[0]}")
    return weight[token]
