"""linear: matrix products with a weight stored as [outputs, inputs], without bias."""

from __future__ import annotations

import numpy as np

from kdtree_nb.reference.precision import Rounding, exact
from kdtree_nb.reference.residual_add import residual_add


def linear(
    x: np.ndarray, weight: np.ndarray, residual: np.ndarray | None = None, rounding: Rounding = exact
) -> np.ndarray:
    """x Wᵀ (+ residual): x [T, K], weight [N, K], residual [T, N] -> [T, N].

    The product is rounded once; adding the residual is a second rounding.
    """
    out = rounding(x @ weight.T)
    return out if residual is None else residual_add(out, residual, rounding)


def linear_heads(x: np.ndarray, weight: np.ndarray, rounding: Rounding = exact) -> np.ndarray:
    """One product per head: x [T, G, K], weight [G, N, K] -> [T, G, N] with out[t, g] = weight[g] x[t, g]."""
    out = x.swapaxes(0, 1) @ weight.swapaxes(1, 2)  # [G, T, K] @ [G, K, N] -> [G, T, N]
    return rounding(out.swapaxes(0, 1))
