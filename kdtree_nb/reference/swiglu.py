"""swiglu: the gated activation of every feed-forward block."""

from __future__ import annotations

import numpy as np

from kdtree_nb.reference.precision import Rounding, exact


def swiglu(gate_up: np.ndarray, rounding: Rounding = exact) -> np.ndarray:
    """silu(gate) · up, with silu(g) = g / (1 + exp(-g)): [T, 2I] (I gates, then I ups) -> [T, I]."""
    gate, up = np.split(gate_up, 2, axis=-1)
    with np.errstate(over="ignore"):  # a very negative gate: exp overflows to inf, and g / inf = 0 is the right limit
        silu = gate / (1 + np.exp(-gate))
    return rounding(silu * up)
