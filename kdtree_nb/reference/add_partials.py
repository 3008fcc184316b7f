"""add_partials: the ranks' parts of a reduction, added in pairs."""

from __future__ import annotations

import numpy as np

from kdtree_nb.reference.precision import Rounding, exact
from kdtree_nb.reference.residual_add import residual_add


def add_partials(partials: np.ndarray, residual: np.ndarray | None = None, rounding: Rounding = exact) -> np.ndarray:
    """((0+1)+(2+3))+((4+5)+(6+7)) of partials [P, T, N], or its part for 1, 2 or 4 ranks (+ residual): [T, N].

    The sum is rounded once; adding the residual is a second rounding.
    """
    while len(partials) > 1:
        partials = partials[0::2] + partials[1::2]
    out = rounding(partials[0])
    return out if residual is None else residual_add(out, residual, rounding)
