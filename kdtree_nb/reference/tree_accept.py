"""tree_accept: the longest path from the root that the target itself would have chosen."""

from __future__ import annotations

import numpy as np

from kdtree_nb.reference.tree import Tree


def tree_accept(tree: Tree, target_token: np.ndarray, max_depth: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """From the root, follow the child whose token is the target's choice at the current node.

    target_token int [B, N]: the target's next token at every node -> (accepted_path i32 [B, L] node indices without the
    root, padded with -1; num_accepted i32 [B]; next_token i64 [B], the first choice that has no child). A tree without
    nodes accepts nothing and has next_token -1. Raises ValueError if an accepted path is longer than L = max_depth.
    """
    num_streams = len(tree.num_nodes)
    accepted_path = np.full((num_streams, max_depth), -1, np.int32)
    num_accepted = np.zeros(num_streams, np.int32)
    next_token = np.full(num_streams, -1, np.int64)
    for stream, count in enumerate(tree.num_nodes):
        if count == 0:
            continue
        child = {(int(tree.parent[stream, i]), int(tree.token[stream, i])): i for i in range(1, count)}
        accepted, node = [], 0
        while (step := (node, int(target_token[stream, node]))) in child:
            node = child[step]
            accepted.append(node)
        if len(accepted) > max_depth:
            raise ValueError(f"tree_accept: expected max_depth of at least {len(accepted)}, got {max_depth}")
        accepted_path[stream, : len(accepted)] = accepted
        num_accepted[stream] = len(accepted)
        next_token[stream] = target_token[stream, node]
    return accepted_path, num_accepted, next_token
