"""Random ragged batches with targets that often agree, and the published rules in their own words."""

from __future__ import annotations

import numpy as np
import torch

from kdtree_nb import ops
from kdtree_nb.tree import DraftTree

SIZES = (0, 1, 7, 8, 15, 16, 30, 31, 32, 33, 62, 63, 64, 65, 126, 127, 128, 129)
"""Budgets around which words and bytes begin."""


def random_trees(
    rng: np.random.Generator, budgets: list[int], L: int = 9, K: int = 24
) -> tuple[DraftTree, np.ndarray]:  # fmt: skip
    """Trees of these budgets over tokens 0 … 2K - 1, and targets i64 [B, N] that name a child at two nodes of three."""
    B, max_budget = len(budgets), max(budgets)
    log_probs = -np.sort(rng.exponential(size=(B, L, K)).astype(np.float32))
    ids = np.argsort(rng.random((B, L, 2 * K)))[..., :K].copy()
    bonus = torch.from_numpy(rng.integers(0, 2 * K, B))
    budget = torch.tensor(budgets, dtype=torch.int32)
    tree = ops.tree_build(torch.from_numpy(log_probs), torch.from_numpy(ids), bonus, budget, max_budget)
    target = rng.integers(0, 2 * K, tree.token.shape)
    parent, token = tree.parent.numpy(), tree.token.numpy()
    for stream, node in np.argwhere((rng.random(token.shape) < 2 / 3) & (parent >= 0)):
        target[stream, parent[stream, node]] = token[stream, node]
    return tree, target


def links_of_mask(visible: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What the engine derives from one stream's mask bool [n, n]: depths, first children, next siblings."""
    n = len(visible)
    strict = np.tril(visible, -1)
    parent = [max(np.flatnonzero(strict[i]), default=-1) for i in range(n)]
    child = [min(np.flatnonzero(strict[:, i]), default=-1) for i in range(n)]
    sibling = [next((k for k in range(i + 1, n) if parent[k] == parent[i] >= 0), -1) for i in range(n)]
    return strict.sum(1), np.array(child), np.array(sibling)
