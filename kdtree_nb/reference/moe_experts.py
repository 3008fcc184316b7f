"""moe_experts: the weighted sum of the chosen experts' feed-forward blocks, and of the shared expert."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kdtree_nb.reference.linear import linear
from kdtree_nb.reference.precision import Rounding, exact
from kdtree_nb.reference.residual_add import residual_add
from kdtree_nb.reference.swiglu import swiglu


class Experts(NamedTuple):
    """Weights of E routed experts of width I and, unless None, one shared expert of width S, over hidden size D."""

    gate_up: np.ndarray  # [E, 2I, D]: I gates, then I ups
    down: np.ndarray  # [E, D, I]
    shared_gate_up: np.ndarray | None = None  # [2S, D]
    shared_down: np.ndarray | None = None  # [D, S]


def moe_experts(
    x: np.ndarray,
    experts: Experts,
    expert_id: np.ndarray,
    weight: np.ndarray,
    residual: np.ndarray | None = None,
    rounding: Rounding = exact,
) -> np.ndarray:
    """Σ weight · expert(x) + shared(x) (+ residual): x [T, D], expert_id int [T, k], weight [T, k] -> [T, D].

    Expert outputs are added unrounded, in order of expert id, the shared expert last; then one rounding; the residual
    is added after it with a second one.
    """
    total = np.zeros_like(x)
    for e in range(len(experts.gate_up)):
        row, choice = np.nonzero(expert_id == e)  # the rows that chose expert e, and where in their list
        if row.size:
            total[row] += weight[row, choice][:, None] * _expert(x[row], experts.gate_up[e], experts.down[e], rounding)
    if experts.shared_gate_up is not None:
        total += _expert(x, experts.shared_gate_up, experts.shared_down, rounding)
    out = rounding(total)
    return out if residual is None else residual_add(out, residual, rounding)


def _expert(x: np.ndarray, gate_up: np.ndarray, down: np.ndarray, rounding: Rounding) -> np.ndarray:
    hidden = swiglu(linear(x, gate_up, rounding=rounding), rounding)
    return linear(hidden, down)  # not rounded: partial sums stay in FP32 until the one rounding
