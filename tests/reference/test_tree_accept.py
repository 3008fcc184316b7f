"""tree_accept against listing every root-to-node path."""

from __future__ import annotations

import numpy as np
import pytest

from kdtree_nb.reference import chain_trees, path, tree_accept
from kdtree_nb.reference.tree import add_node, empty_trees


def random_case(seed: int):
    """A tree whose siblings differ, over 3 tokens (0 among them), and a choice of the target at every node."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 20))
    tree = empty_trees(1, 20)
    add_node(tree, 0, 0, -1, 0.0)
    while tree.num_nodes[0] < count:
        parent, token = int(rng.integers(tree.num_nodes[0])), int(rng.integers(3))
        used = {(int(p), int(t)) for p, t in zip(tree.parent[0], tree.token[0], strict=True)}
        if (parent, token) not in used or parent == -1:
            add_node(tree, 0, token, parent, 0.0)
    target = rng.integers(0, 3, (1, 21))
    target[0, count:] = 10**9  # never read
    return tree, target


def test_is_the_longest_path_the_target_agrees_with():
    lengths = set()
    for seed in range(300):
        tree, target = random_case(seed)
        paths = [path(tree, 0, node) for node in range(tree.num_nodes[0])]
        agreed = [p for p in paths if all(tree.token[0, b] == target[0, a] for a, b in zip(p, p[1:], strict=False))]
        longest = max(agreed, key=len)
        accepted, count, following = tree_accept(tree, target, 20)
        assert count[0] == len(longest) - 1
        assert accepted[0].tolist() == longest[1:] + [-1] * (20 - len(longest) + 1)
        assert following[0] == target[0, longest[-1]]
        lengths.add(int(count[0]))
    assert lengths >= {0, 1, 2, 3}


def test_batch_with_nothing_a_full_chain_and_an_empty_stream():
    tree = chain_trees([[4, 0, 6], [4, 0, 6], []])
    target = np.array([[0, 6, 2], [1, 6, 2], [3, 3, 3]])
    accepted, count, following = tree_accept(tree, target, 2)
    assert accepted.tolist() == [[1, 2], [-1, -1], [-1, -1]]
    assert count.tolist() == [2, 0, 0] and following.tolist() == [2, 1, -1]
    assert (accepted.dtype, count.dtype, following.dtype) == (np.int32, np.int32, np.int64)


def test_path_longer_than_max_depth():
    with pytest.raises(ValueError, match="tree_accept: expected max_depth of at least 2, got 1"):
        tree_accept(chain_trees([[4, 5, 6]]), np.array([[5, 6, 0]]), 1)
