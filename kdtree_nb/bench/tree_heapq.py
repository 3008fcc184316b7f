"""tree_build as the DDTree paper publishes it, in plain Python: the peer that the native one is measured against.

Ringel & Romano 2026: a heap of prefixes named by their tuples of ranks, a dictionary of children per node, and a dense
visibility matrix. As published, without this project's rules for ties, -inf and batches.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np


class PublishedTree(NamedTuple):
    """Nodes in best-first order, the root left out of token and depth; node i + 1 is entry i of both."""

    token: list[int]
    depth: list[int]
    parent: list[int]  # of every node, -1 for the root
    children: list[dict[int, int]]  # per node, token id -> node
    visibility: np.ndarray  # bool [n, n], root included


def build_tree_heapq(log_probs: np.ndarray, token_ids: np.ndarray, budget: int) -> PublishedTree:
    """The `budget` heaviest prefixes of one stream: log_probs float [L, K], token_ids int [L, K], best first."""
    rows, ids = log_probs.tolist(), token_ids.tolist()
    depth_limit, num_candidates = len(rows), len(rows[0])
    token: list[int] = []
    depth: list[int] = []
    parent = [-1]
    children: list[dict[int, int]] = [{}]
    heap = [(-rows[0][0], (0,), 0, 0.0)]  # negated score, ranks, parent's node, parent's score
    while heap and len(token) < budget:
        negated, ranks, above, score_above = heapq.heappop(heap)
        level, rank = len(ranks) - 1, ranks[-1]
        node = len(parent)
        token.append(ids[level][rank])
        depth.append(level + 1)
        parent.append(above)
        children.append({})
        children[above][ids[level][rank]] = node
        if rank + 1 < num_candidates:
            sibling = ranks[:-1] + (rank + 1,)
            heapq.heappush(heap, (-(score_above + rows[level][rank + 1]), sibling, above, score_above))
        if level + 1 < depth_limit:
            heapq.heappush(heap, (negated - rows[level + 1][0], ranks + (0,), node, -negated))
    return PublishedTree(token, depth, parent, children, _visibility(parent))


def _visibility(parent: list[int]) -> np.ndarray:
    visibility = np.zeros((len(parent), len(parent)), dtype=bool)
    visibility[0, 0] = True
    for node in range(1, len(parent)):
        visibility[node, :node] = visibility[parent[node], :node]
        visibility[node, node] = True
    return visibility
