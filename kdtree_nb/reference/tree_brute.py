"""tree_brute: the oracle of tree_build. Enumerates every prefix, sorts all of them, takes the first ones."""

from __future__ import annotations

import numpy as np

from kdtree_nb.reference.tree import Tree, add_node, empty_trees


def all_prefixes(log_probs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every non-empty prefix of [L, K] candidates: (score f64 [M], ranks int [M, L] padded with -1), M = K + … + K^L.

    The score of a prefix is its parent's score plus log_probs[depth-1, rank], in float64.
    """
    max_depth, num_candidates = log_probs.shape
    score, ranks = np.zeros(1), np.empty((1, 0), int)  # the root, then one level after the other
    scores, paths = [], []
    for depth in range(max_depth):
        score = (score[:, None] + log_probs[depth].astype(np.float64)).ravel()
        last_rank = np.tile(np.arange(num_candidates), len(ranks))
        ranks = np.column_stack([np.repeat(ranks, num_candidates, axis=0), last_rank])
        scores.append(score)
        paths.append(np.pad(ranks, ((0, 0), (0, max_depth - depth - 1)), constant_values=-1))
    return np.concatenate([np.empty(0), *scores]), np.concatenate([np.empty((0, max_depth), int), *paths])


def tree_brute(log_probs: np.ndarray, token_ids: np.ndarray, bonus: np.ndarray, budget: np.ndarray) -> Tree:
    """What `tree_build` returns, by brute force; only for small L and K. Arguments as there, budget int [B]."""
    tree = empty_trees(len(log_probs), int(np.max(budget, initial=0)))
    for stream in range(len(log_probs)):
        add_node(tree, stream, int(bonus[stream]), parent=-1, log_prob=0.0)
        score, ranks = all_prefixes(log_probs[stream])
        keys = (*ranks.T[::-1], -score)  # lexsort: the last key decides first. -1 sorts a prefix before its extension
        order = [i for i in np.lexsort(keys) if score[i] > -np.inf]
        node_of = {(): 0}
        for i in order[: budget[stream]]:
            prefix = tuple(int(rank) for rank in ranks[i] if rank >= 0)
            token = int(token_ids[stream, len(prefix) - 1, prefix[-1]])
            node_of[prefix] = add_node(tree, stream, token, node_of[prefix[:-1]], score[i])
    return tree
