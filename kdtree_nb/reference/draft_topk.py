"""draft_topk: from the drafter's logits to its best candidates at each depth."""

from __future__ import annotations

import numpy as np


def draft_topk(logits: np.ndarray, num_candidates: int) -> tuple[np.ndarray, np.ndarray]:
    """Log-softmax over V and its K largest: logits [B, L, V] -> (log_probs f32 [B, L, K], token_ids i64 [B, L, K]).

    Largest first, the lower id first among equal logits. log_prob = (x - max) - log Σ exp(x - max), so never above 0.
    A logit of -inf has probability 0; a row of nothing else has no candidate, all its log-probs are -inf.
    Raises ValueError for NaN or +inf, and for a K outside 1 … V.
    """
    if not 1 <= num_candidates <= logits.shape[-1]:
        raise ValueError(f"draft_topk: expected num_candidates in 1 … {logits.shape[-1]}, got {num_candidates}")
    logits = np.asarray(logits, np.float64)
    if np.isnan(logits).any() or np.isposinf(logits).any():
        raise ValueError("draft_topk: expected logits that are finite or -inf, got NaN or +inf")
    token_ids = np.argsort(-logits, axis=-1, kind="stable")[..., :num_candidates]
    largest = np.maximum(logits.max(axis=-1, keepdims=True), np.finfo(np.float64).min)  # finite in a row of -inf too
    shifted = logits - largest
    with np.errstate(divide="ignore", invalid="ignore"):  # such a row sums to 0
        log_probs = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    log_probs[np.isneginf(shifted)] = -np.inf
    return np.take_along_axis(log_probs, token_ids, axis=-1).astype(np.float32), token_ids
