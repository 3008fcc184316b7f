"""tree_rows against the reference, and its bad inputs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from kdtree_nb import ops, reference
from kdtree_nb.tree import DraftTree

pytestmark = pytest.mark.usefixtures("on_device")
BY_VALUE = pytest.mark.cpu_only("a GPU does not look at values: tests/cuda/test_bad_values.py")


def random_tree(rng, budgets, L: int = 6, K: int = 8) -> DraftTree:
    log_probs = -np.sort(rng.exponential(size=(len(budgets), L, K)).astype(np.float32))
    ids = np.argsort(rng.random((len(budgets), L, 20)))[..., :K].copy()
    return ops.tree_build(
        torch.from_numpy(log_probs), torch.from_numpy(ids), torch.from_numpy(rng.integers(0, 9, len(budgets))),
        torch.tensor(budgets, dtype=torch.int32), max(budgets, default=0),
    )  # fmt: skip


def as_reference(tree: DraftTree) -> reference.Tree:
    return reference.Tree(*(getattr(tree, name).numpy() for name in reference.Tree._fields))


@pytest.mark.parametrize("budgets", [[0], [1], [31, 0, 33], [63, 64, 65, 1], [1023, 7]])
def test_equals_the_reference(budgets, rng):
    tree = random_tree(rng, budgets)
    prefix_len = torch.from_numpy(rng.integers(0, 5000, len(budgets)).astype(np.int32))
    rows = ops.tree_rows(tree, prefix_len)
    want = reference.tree_rows(as_reference(tree), prefix_len.numpy())
    for name in want._fields:
        got = getattr(rows, name).numpy()
        assert got.dtype == getattr(want, name).dtype and np.array_equal(got, getattr(want, name)), name
    assert len(rows.token) == int(tree.num_nodes.sum()) == sum(tree.num_nodes.tolist())


def test_streams_without_nodes_give_no_rows(rng):
    tree = random_tree(rng, [4, 4, 4])
    tree.num_nodes[1] = 0
    rows = ops.tree_rows(tree, torch.zeros(3, dtype=torch.int32))
    assert rows.stream.tolist() == [0] * 5 + [2] * 5
    tree.num_nodes[:] = 0
    assert ops.tree_rows(tree, torch.zeros(3, dtype=torch.int32)).token.shape == (0,)


def test_slots_past_num_nodes_are_never_read(rng):
    tree = random_tree(rng, [3, 5])
    tree.num_nodes[0] = 2
    want = ops.tree_rows(tree, torch.tensor([7, 8], dtype=torch.int32))
    tree.depth[0, 2:] = 2**30
    tree.token[0, 2:] = -(2**60)
    got = ops.tree_rows(tree, torch.tensor([7, 8], dtype=torch.int32))
    assert all(torch.equal(a, b) for a, b in zip(got[:5], want[:5], strict=True))


@pytest.mark.parametrize(
    ("field", "index", "value", "message"),
    [
        ("num_nodes", 1, 9, "num_nodes: expected 0 … 8, got 9"),
        ("num_nodes", 1, -1, "num_nodes: expected 0 … 8, got -1"),
        pytest.param("depth", (1, 3), -1, "expected a parent index", marks=BY_VALUE),
        pytest.param("depth", (1, 3), 4, "expected a parent index", marks=BY_VALUE),
    ],
)
def test_bad_trees(field, index, value, message, rng):
    tree = random_tree(rng, [7, 7])
    getattr(tree, field)[index] = value
    with pytest.raises(ValueError, match=f"tree_rows: {message}"):
        ops.tree_rows(tree, torch.zeros(2, dtype=torch.int32))


@BY_VALUE
@pytest.mark.parametrize("prefix_len", [-1, 2**31 - 8])
def test_bad_prefix_len(prefix_len, rng):
    with pytest.raises(ValueError, match=f"tree_rows: prefix_len: expected 0 … 2147483639, got {prefix_len} at"):
        ops.tree_rows(random_tree(rng, [7, 7]), torch.tensor([0, prefix_len], dtype=torch.int32))


def test_largest_prefix_len(rng):
    rows = ops.tree_rows(random_tree(rng, [7]), torch.tensor([2**31 - 9], dtype=torch.int32))
    assert rows.slot.tolist() == list(range(2**31 - 9, 2**31 - 1))


def test_wrong_arguments(rng):
    tree = random_tree(rng, [7, 7])
    with pytest.raises(ValueError, match="tree_rows: prefix_len: expected dtype Int, got Long"):
        ops.tree_rows(tree, torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="tree_rows: prefix_len: expected shape"):
        ops.tree_rows(tree, torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="tree_rows: depth: expected shape"):
        ops.tree_rows(
            dataclasses.replace(tree, depth=tree.depth[:, :5].contiguous()), torch.zeros(2, dtype=torch.int32)
        )


def test_opcheck(opcheck, rng):
    tree = random_tree(rng, [5, 3])
    opcheck("tree_rows", tree.token, tree.depth, tree.num_nodes, torch.tensor([4, 9], dtype=torch.int32))
