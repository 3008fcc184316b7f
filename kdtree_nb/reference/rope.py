"""rope: rotary position embedding in NeoX order (element i is paired with element i + R/2)."""

from __future__ import annotations

import numpy as np

from kdtree_nb.config import Yarn
from kdtree_nb.reference.precision import Rounding, exact


def rope_table(num_positions: int, dim: int, theta: float, yarn: Yarn | None = None) -> np.ndarray:
    """Cosines and sines of every angle, float64 [P, R]: R/2 cosines, then R/2 sines, by absolute position.

    Pair i turns by position · theta^(-2i/R). YaRN turns the pairs of long wavelength `factor` times slower, and
    lengthens all of them.
    """
    frequency = theta ** (-2.0 * np.arange(dim // 2) / dim)
    amplitude = 1.0
    if yarn is not None:
        keep = _kept_share(frequency, yarn, theta)
        frequency = keep * frequency + (1.0 - keep) * frequency / yarn.factor
        amplitude = yarn.amplitude
    angle = np.arange(num_positions)[:, None] * frequency
    return amplitude * np.concatenate([np.cos(angle), np.sin(angle)], axis=1)


def _kept_share(frequency: np.ndarray, yarn: Yarn, theta: float) -> np.ndarray:
    """How much of each frequency YaRN keeps: 1 for those with more than beta_fast turns within the original length, 0
    for those with fewer than beta_slow, linear in the pair's index between the two (whole) indices."""
    dim = 2 * len(frequency)

    def pair_with(num_turns: float) -> float:  # the pair i whose theta^(-2i/R) gives so many turns
        wavelength = yarn.original_max_position_embeddings / num_turns
        return dim / 2 * np.log(wavelength / (2 * np.pi)) / np.log(theta)

    low = max(np.floor(pair_with(yarn.beta_fast)), 0.0)
    high = min(np.ceil(pair_with(yarn.beta_slow)), dim - 1.0)
    high = low + 0.001 if high == low else high
    return 1.0 - np.clip((np.arange(len(frequency)) - low) / (high - low), 0.0, 1.0)


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
