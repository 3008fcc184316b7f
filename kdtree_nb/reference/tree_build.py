"""tree_build: the heaviest prefixes of a drafter's marginals, found best first with a heap."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from kdtree_nb.config import MAX_BUDGET
from kdtree_nb.reference.tree import Tree, add_node, empty_trees


def tree_build(
    log_probs: np.ndarray,
    token_ids: np.ndarray,
    bonus: np.ndarray | Sequence[int],
    budget: np.ndarray | Sequence[int] | int,
    max_budget: int | None = None,
) -> Tree:
    """The trees of the budget[b] heaviest prefixes, nodes in best-first order.

    log_probs f32 [B, L, K] and token_ids int [B, L, K]: K candidates of each depth, best first. bonus int [B]: the root
    tokens. budget int [B] or one int: nodes besides the root. max_budget: the size of the arrays, by default the
    largest budget. A candidate of -inf is never taken, so a tree may be smaller than its budget.
    Raises ValueError for a bad shape or budget, and for a row that is NaN, positive, increasing or repeats a token id.
    """
    num_streams = len(log_probs)
    budget = np.broadcast_to(budget, num_streams)
    max_budget = int(budget.max(initial=0)) if max_budget is None else max_budget
    check_budget(budget, max_budget)
    check_candidates(log_probs, token_ids)
    tree = empty_trees(num_streams, max_budget)
    for stream in range(num_streams):
        add_node(tree, stream, int(bonus[stream]), parent=-1, log_prob=0.0)
        _grow(tree, stream, log_probs[stream].astype(np.float64), token_ids[stream], int(budget[stream]))
    return tree


def _grow(tree: Tree, stream: int, log_probs: np.ndarray, token_ids: np.ndarray, budget: int) -> None:
    """Take the best waiting prefix `budget` times. log_probs and token_ids: [L, K].

    A prefix is known by its ranks, one per depth. It waits in the heap from the moment its parent and its better
    sibling were taken: both come before it, so the smallest entry of the heap is always the next of all prefixes.
    Entries compare by score, largest first, then by rank path; Python orders (1,) before (1, 0) before (2,).
    """
    max_depth, num_candidates = log_probs.shape
    heap: list[tuple[float, tuple[int, ...], int]] = []

    def push(parent: int, ranks: tuple[int, ...]) -> None:
        depth, rank = len(ranks), ranks[-1]
        if depth <= max_depth and rank < num_candidates and log_probs[depth - 1, rank] > -np.inf:
            score = tree.log_prob[stream, parent] + log_probs[depth - 1, rank]
            heapq.heappush(heap, (-score, ranks, parent))

    push(0, (0,))
    while heap and tree.num_nodes[stream] <= budget:
        negative_score, ranks, parent = heapq.heappop(heap)
        token = int(token_ids[len(ranks) - 1, ranks[-1]])
        node = add_node(tree, stream, token, parent, -negative_score)
        push(parent, (*ranks[:-1], ranks[-1] + 1))  # its next sibling
        push(node, (*ranks, 0))  # its first child


def check_budget(budget: np.ndarray, max_budget: int) -> None:
    """Raise ValueError unless 0 ≤ budget ≤ max_budget ≤ 1023 in every stream."""
    if not 0 <= max_budget <= MAX_BUDGET:
        raise ValueError(f"tree_build: expected max_budget in 0 … {MAX_BUDGET}, got {max_budget}")
    outside = budget[(budget < 0) | (budget > max_budget)]
    if outside.size:
        raise ValueError(f"tree_build: expected budgets in 0 … {max_budget}, got {outside[0]}")


def check_candidates(log_probs: np.ndarray, token_ids: np.ndarray) -> None:
    """Raise ValueError unless every row [K] of log_probs is ≤ 0 and non-increasing and its token ids differ."""
    if log_probs.ndim != 3 or log_probs.shape != token_ids.shape:
        raise ValueError(
            f"tree_build: expected log_probs and token_ids [B, L, K], got {log_probs.shape} and {token_ids.shape}"
        )
    if np.isnan(log_probs).any():
        raise ValueError("tree_build: expected log_probs without NaN, got NaN")
    if (log_probs > 0).any():
        raise ValueError(f"tree_build: expected log_probs of at most 0, got {log_probs.max()}")
    if (log_probs[..., 1:] > log_probs[..., :-1]).any():
        raise ValueError("tree_build: expected rows of log_probs that never increase, got an increase")
    ordered = np.sort(token_ids, axis=-1)
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise ValueError("tree_build: expected different token ids in a row, got a repeated id")
