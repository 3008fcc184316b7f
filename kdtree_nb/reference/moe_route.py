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
    num_groups: int = 1,
    topk_groups: int = 1,
) -> tuple[np.ndarray, np.ndarray]:
    """The top_k experts of each row: logits [T, E], bias [E] -> (expert_id i32 [T, k] ascending, weight [T, k]).

    Scores are the softmax over all experts, or the sigmoid of each logit. The bias takes part in the selection only;
    the weights are the unbiased scores, divided by their sum if `renormalize`, times `scaling_factor`. Equal scores:
    the lower id first. With several groups of neighbouring experts, only those of the topk_groups groups take part
    whose two best score + bias have the largest sum (equal sums: the lower group). Raises ValueError for an unknown
    scoring, a top_k outside 1 … E and groups that do not divide the experts.
    """
    if scoring not in ("softmax", "sigmoid"):
        raise ValueError(f"moe_route: expected scoring 'softmax' or 'sigmoid', got {scoring!r}")
    if not 1 <= top_k <= logits.shape[-1]:
        raise ValueError(f"moe_route: expected top_k in 1 … {logits.shape[-1]}, got {top_k}")
    _check_groups(logits.shape[-1], top_k, num_groups, topk_groups)
    score = _softmax(logits) if scoring == "softmax" else 1 / (1 + np.exp(-logits))
    selection = score if bias is None else score + bias
    if num_groups > 1:
        selection = np.where(_in_best_groups(selection, num_groups, topk_groups), selection, -np.inf)
    best_first = np.argsort(-selection, axis=-1, kind="stable")  # stable: the lower id comes first among equals
    expert_id = np.sort(best_first[:, :top_k], axis=-1)
    weight = np.take_along_axis(score, expert_id, axis=-1)
    if renormalize:
        weight = weight / (weight.sum(axis=-1, keepdims=True) + 1e-20)
    return expert_id.astype(np.int32), weight * scaling_factor


def _check_groups(num_experts: int, top_k: int, num_groups: int, topk_groups: int) -> None:
    if num_groups == 1:
        return
    size = num_experts // max(num_groups, 1)
    if num_groups < 1 or num_experts % num_groups or size < 2 or not 1 <= topk_groups <= num_groups:
        raise ValueError(
            f"moe_route: expected whole groups of at least 2 of {num_experts} experts and topk_groups in 1 … groups, "
            f"got {num_groups} groups and topk_groups {topk_groups}"
        )
    if top_k > topk_groups * size:
        raise ValueError(f"moe_route: expected top_k in 1 … {topk_groups * size}, got {top_k}")


def _in_best_groups(selection: np.ndarray, num_groups: int, topk_groups: int) -> np.ndarray:
    """bool [T, E]: whether an expert's group is among the best."""
    by_group = selection.reshape(len(selection), num_groups, -1)
    two_best = np.sort(by_group, axis=-1)[..., -2:].sum(axis=-1)
    best_first = np.argsort(-two_best, axis=-1, kind="stable")
    chosen = np.zeros_like(two_best, dtype=bool)
    np.put_along_axis(chosen, best_first[:, :topk_groups], True, axis=-1)
    return np.repeat(chosen, by_group.shape[-1], axis=-1)


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)
