"""moe_route: choose the experts of each token and their weights."""

from __future__ import annotations

import numpy as np


def moe_route(
    logits: np.ndarray,
    top_k: int,
    scoring: str = "softmax",
    bias: np.ndarray | None = None,
    renormalize: bool = False,
    scaling_factor: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """The top_k experts of each row: logits [T, E], bias [E] -> (expert_id i32 [T, k] ascending, weight [T, k]).

    Scores are the softmax over all experts, or the sigmoid of each logit. The bias takes part in the selection only;
    the weights are the unbiased scores, divided by their sum if `renormalize`, times `scaling_factor`. Equal scores:
    the lower id first. Raises ValueError for an unknown scoring or a top_k outside 1 … E.
    """
    if scoring not in ("softmax", "sigmoid"):
        raise ValueError(f"moe_route: expected scoring 'softmax' or 'sigmoid', got {scoring!r}")
    if not 1 <= top_k <= logits.shape[-1]:
        raise ValueError(f"moe_route: expected top_k in 1 … {logits.shape[-1]}, got {top_k}")
    score = _softmax(logits) if scoring == "softmax" else 1 / (1 + np.exp(-logits))
    selection = score if bias is None else score + bias
    best_first = np.argsort(-selection, axis=-1, kind="stable")  # stable: the lower id comes first among equals
    expert_id = np.sort(best_first[:, :top_k], axis=-1)
    weight = np.take_along_axis(score, expert_id, axis=-1)
    if renormalize:
        weight = weight / (weight.sum(axis=-1, keepdims=True) + 1e-20)
    return expert_id.astype(np.int32), weight * scaling_factor


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)
