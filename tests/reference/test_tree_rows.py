"""tree_rows: order, positions, slots, skipped streams."""

from __future__ import annotations

import numpy as np

from kdtree_nb.reference import chain_trees, tree_rows
from kdtree_nb.reference.tree import add_node, empty_trees


def test_rows_of_a_ragged_batch():
    tree = empty_trees(3, 4)
    for token, parent in ((5, -1), (6, 0), (7, 0), (8, 2)):
        add_node(tree, 0, token, parent, 0.0)
    add_node(tree, 2, 9, -1, 0.0)
    rows = tree_rows(tree, np.array([10, 77, 0]))
    assert rows.stream.tolist() == [0, 0, 0, 0, 2]
    assert rows.node.tolist() == [0, 1, 2, 3, 0]
    assert rows.position.tolist() == [10, 11, 11, 12, 0]
    assert rows.slot.tolist() == [10, 11, 12, 13, 0]
    assert rows.token.tolist() == [5, 6, 7, 8, 9]
    assert [array.dtype for array in rows] == [np.int32] * 4 + [np.int64]


def test_no_rows():
    rows = tree_rows(chain_trees([[], []]), np.array([3, 4]))
    assert [array.shape for array in rows] == [(0,)] * 5
