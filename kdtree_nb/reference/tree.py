"""Tree: a batch of draft trees as numpy arrays, with the field names of `kdtree_nb.tree.DraftTree`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Tree(NamedTuple):
    """B trees of at most N = 1 + max_budget nodes. Node 0 is the root; slots past num_nodes hold fillers."""

    token: np.ndarray  # i64 [B, N], filler -1
    parent: np.ndarray  # i32 [B, N], smaller than the node's own index; root and filler -1
    depth: np.ndarray  # i32 [B, N], 0 at the root, filler -1
    log_prob: np.ndarray  # f64 [B, N], sum from the root, 0 at the root, filler -inf
    ancestor_bits: np.ndarray  # i64 [B, N, ceil(N/64)], bit j: node j is this node or an ancestor of it
    num_nodes: np.ndarray  # i32 [B], root included


def empty_trees(num_streams: int, max_budget: int) -> Tree:
    """B trees without any node: every slot a filler. `add_node` fills them."""
    shape = (num_streams, 1 + max_budget)
    return Tree(
        token=np.full(shape, -1, np.int64),
        parent=np.full(shape, -1, np.int32),
        depth=np.full(shape, -1, np.int32),
        log_prob=np.full(shape, -np.inf),
        ancestor_bits=np.zeros((*shape, -(-shape[1] // 64)), np.int64),
        num_nodes=np.zeros(num_streams, np.int32),
    )


def add_node(tree: Tree, stream: int, token: int, parent: int, log_prob: float) -> int:
    """Append a node to one tree (parent -1 for its root) and return its index."""
    node = int(tree.num_nodes[stream])
    tree.num_nodes[stream] += 1
    tree.token[stream, node] = token
    tree.parent[stream, node] = parent
    tree.log_prob[stream, node] = log_prob
    if parent < 0:
        tree.depth[stream, node] = 0
    else:
        tree.depth[stream, node] = tree.depth[stream, parent] + 1
        tree.ancestor_bits[stream, node] = tree.ancestor_bits[stream, parent]
    words = tree.ancestor_bits.view(np.uint64)
    words[stream, node, node // 64] |= np.uint64(1) << np.uint64(node % 64)
    return node


def path(tree: Tree, stream: int, node: int) -> list[int]:
    """Node indices from the root (included) down to `node`."""
    nodes = []
    while node >= 0:
        nodes.append(node)
        node = int(tree.parent[stream, node])
    return nodes[::-1]


def visibility(tree: Tree, stream: int) -> np.ndarray:
    """bool [n, n] with n = num_nodes: row i, column j is True where node j is node i or an ancestor of it."""
    count = int(tree.num_nodes[stream])
    visible = np.zeros((count, count), bool)
    for node in range(count):
        visible[node, path(tree, stream, node)] = True
    return visible


def chain_trees(tokens: Sequence[Sequence[int]]) -> Tree:
    """One chain per stream, each token the parent of the next: what prefill and one-token decoding run.

    A stream without tokens gets a tree without nodes, which `tree_rows` skips.
    """
    tree = empty_trees(len(tokens), max(0, max(map(len, tokens)) - 1))
    for stream, chain in enumerate(tokens):
        for parent, token in enumerate(chain, start=-1):
            add_node(tree, stream, token, parent, log_prob=0.0)
    return tree
