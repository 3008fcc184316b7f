"""Tree: fillers, paths, ancestor bits beyond one word."""

from __future__ import annotations

import numpy as np

from kdtree_nb.reference import chain_trees, path, visibility
from kdtree_nb.reference.tree import add_node, empty_trees


def random_tree(num_nodes: int, max_budget: int):
    tree = empty_trees(1, max_budget)
    rng = np.random.default_rng(num_nodes)
    for node in range(num_nodes):
        assert add_node(tree, 0, node + 100, int(rng.integers(node)) if node else -1, -float(node)) == node
    return tree


def test_bits_paths_and_visibility_agree():
    for num_nodes in (1, 2, 63, 64, 65, 130):
        tree = random_tree(num_nodes, 150)
        seen = visibility(tree, 0)
        assert seen.shape == (num_nodes, num_nodes)
        for node in range(num_nodes):
            ancestors = path(tree, 0, node)
            bits = [j for j in range(150) if (int(tree.ancestor_bits[0, node, j // 64]) >> (j % 64)) & 1]
            assert bits == ancestors == np.flatnonzero(seen[node]).tolist()
            assert ancestors[0] == 0 and ancestors[-1] == node and tree.depth[0, node] == len(ancestors) - 1
            for parent, child in zip(ancestors, ancestors[1:], strict=False):
                assert tree.parent[0, child] == parent


def test_fillers():
    tree = random_tree(3, 5)
    assert tree.ancestor_bits.shape == (1, 6, 1) and tree.num_nodes.tolist() == [3]
    for array, filler in ((tree.token, -1), (tree.parent, -1), (tree.depth, -1), (tree.log_prob, -np.inf)):
        assert (array[0, 3:] == filler).all()
    assert not tree.ancestor_bits[0, 3:].any()


def test_dtypes_are_those_of_the_contract():
    dtypes = [array.dtype for array in empty_trees(2, 3)]
    assert dtypes == [np.int64, np.int32, np.int32, np.float64, np.int64, np.int32]


def test_chains():
    tree = chain_trees([[7, 0, 9], [], [5]])
    assert tree.token.tolist() == [[7, 0, 9], [-1, -1, -1], [5, -1, -1]]
    assert tree.parent.tolist() == [[-1, 0, 1], [-1, -1, -1], [-1, -1, -1]]
    assert tree.num_nodes.tolist() == [3, 0, 1]
    assert visibility(tree, 0).tolist() == np.tri(3, dtype=bool).tolist()
    assert visibility(tree, 1).shape == (0, 0)
