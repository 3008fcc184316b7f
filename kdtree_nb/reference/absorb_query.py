"""absorb_query: queries as absorbed attention takes them."""

from __future__ import annotations

import numpy as np

from kdtree_nb.reference.linear import linear_heads
from kdtree_nb.reference.precision import Rounding, exact
from kdtree_nb.reference.rope import rope


def absorb_query(
    q: np.ndarray, w_kc: np.ndarray, cos_sin: np.ndarray, position: np.ndarray, rounding: Rounding = exact
) -> tuple[np.ndarray, np.ndarray]:
    """q [T, H·K + H·R], w_kc [H, C, K], cos_sin [positions, R] -> q_latent [T, H, C] and rotated q_rope [T, H, R].

    Raises ValueError for a position outside the table.
    """
    T, (H, _, K) = len(q), w_kc.shape
    q_nope, q_rope = q[:, : H * K].reshape(T, H, K), q[:, H * K :].reshape(T, H, cos_sin.shape[1])
    return linear_heads(q_nope, w_kc, rounding), rope(q_rope, cos_sin, position, rounding)
