"""tree_rows: flatten the trees of a batch into the rows of one forward pass."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kdtree_nb.reference.tree import Tree


class Rows(NamedTuple):
    """The T rows of one forward pass: the nodes of stream 0, then those of stream 1, …"""

    stream: np.ndarray  # i32 [T]
    node: np.ndarray  # i32 [T]
    position: np.ndarray  # i32 [T] in the text: prefix_len + depth
    slot: np.ndarray  # i32 [T] in the cache: prefix_len + node
    token: np.ndarray  # i64 [T]


def tree_rows(tree: Tree, prefix_len: np.ndarray) -> Rows:
    """One row per node in use: prefix_len int [B] -> Rows. A tree with num_nodes 0 gives no row."""
    pairs = [(stream, node) for stream, count in enumerate(tree.num_nodes) for node in range(count)]
    stream, node = np.array(pairs, np.int32).reshape(-1, 2).T
    prefix = np.asarray(prefix_len, np.int32)[stream]
    return Rows(stream, node, prefix + tree.depth[stream, node], prefix + node, tree.token[stream, node])


def tree_rows_padded(tree: Tree, prefix_len: np.ndarray) -> tuple[Rows, np.ndarray, np.ndarray]:
    """`tree_rows` padded with -1 to B * N rows, the first row i32 [B] of each stream, and the number in use i32 [1]."""
    rows = tree_rows(tree, prefix_len)
    num_rows = len(rows.token)
    padding = (0, tree.token.size - num_rows)
    padded = Rows(*(np.pad(field, padding, constant_values=-1) for field in rows))
    begin = np.cumsum(tree.num_nodes, dtype=np.int32) - tree.num_nodes
    return padded, begin, np.array([num_rows], np.int32)
