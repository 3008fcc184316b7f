"""DraftTree: paths, children, visibility and sizes of a small batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kdtree_nb import ops, reference
from kdtree_nb.tree import DraftTree


@pytest.fixture
def tree() -> DraftTree:
    """Stream 0: root 9 with children 1, 2, and 3 below 1. Stream 1: a root alone."""
    log_probs = torch.tensor([[[-0.1, -0.5], [-0.2, -9.0]], [[-torch.inf, -torch.inf]] * 2])
    ids = torch.tensor([[[1, 2], [3, 4]]] * 2)
    return ops.tree_build(log_probs, ids, torch.tensor([9, 8]), 3)


def test_sizes(tree):
    assert (tree.num_streams, tree.max_budget, tree.num_nodes.tolist()) == (2, 3, [4, 1])


def test_path(tree):
    assert [tree.token[0, tree.path(0, node)].tolist() for node in range(4)] == [[9], [9, 1], [9, 1, 3], [9, 2]]
    for stream, node in ((0, 4), (0, -1), (1, 1)):
        with pytest.raises(ValueError, match="DraftTree.path: expected a node below"):
            tree.path(stream, node)


def test_children(tree):
    assert [tree.children(0, node) for node in range(4)] == [[1, 3], [2], [], []]
    assert tree.children(1, 0) == []


def test_visibility(tree):
    assert tree.visibility(0).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]
    assert tree.visibility(1).tolist() == [[True]]


def test_visibility_beyond_one_word():
    rng = np.random.default_rng(5)
    log_probs = torch.from_numpy(-np.sort(rng.exponential(size=(1, 15, 20)).astype(np.float32)))
    ids = torch.arange(20).expand(1, 15, 20).contiguous()
    tree = ops.tree_build(log_probs, ids, torch.tensor([0]), 200)
    arrays = reference.Tree(*(getattr(tree, name).numpy() for name in reference.Tree._fields))
    assert tree.ancestor_bits.shape[-1] == 4
    assert np.array_equal(tree.visibility(0).numpy(), reference.visibility(arrays, 0))


def test_is_frozen(tree):
    with pytest.raises(AttributeError):
        tree.token = tree.parent
