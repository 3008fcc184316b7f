"""tree_accept against the reference on random trees and targets, and its bad inputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kdtree_nb import ops, reference
from kdtree_nb.tree import DraftTree

pytestmark = pytest.mark.usefixtures("on_device")
BY_VALUE = pytest.mark.cpu_only("a GPU does not look at values: tests/cuda/test_bad_values.py")


def random_case(rng, num_streams: int, L: int, K: int, max_budget: int, hit_rate: float):
    """Trees, and targets that name a child of their node at the hit rate, another token of the vocabulary otherwise."""
    log_probs = -np.sort(rng.exponential(size=(num_streams, L, K)).astype(np.float32))
    ids = np.argsort(rng.random((num_streams, L, 2 * K)))[..., :K].copy()
    budget = torch.from_numpy(rng.integers(0, max_budget + 1, num_streams).astype(np.int32))
    bonus = torch.from_numpy(rng.integers(0, 2 * K, num_streams))
    tree = ops.tree_build(torch.from_numpy(log_probs), torch.from_numpy(ids), bonus, budget, max_budget)
    target = rng.integers(0, 2 * K, tree.token.shape)
    parent, token = tree.parent.numpy(), tree.token.numpy()
    for stream, node in np.argwhere((rng.random(token.shape) < hit_rate) & (parent >= 0)):
        target[stream, parent[stream, node]] = token[stream, node]
    return tree, torch.from_numpy(target)


def check(tree: DraftTree, target: torch.Tensor, max_depth: int):
    arrays = reference.Tree(*(getattr(tree, name).numpy() for name in reference.Tree._fields))
    results = ops.tree_accept(tree, target, max_depth)
    for got, want in zip(results, reference.tree_accept(arrays, target.numpy(), max_depth), strict=True):
        assert got.numpy().dtype == want.dtype and np.array_equal(got.numpy(), want)
    return results


@pytest.mark.parametrize("hit_rate", [0.0, 0.2, 0.9])
@pytest.mark.parametrize(("L", "K", "max_budget"), [(1, 1, 1), (1, 9, 9), (9, 1, 9), (3, 3, 30), (15, 8, 65)])
def test_equals_the_reference(L, K, max_budget, hit_rate, rng):
    tree, target = random_case(rng, 700, L, K, max_budget, hit_rate)
    _, num_accepted, _ = check(tree, target, L)
    if hit_rate == 0.9:
        assert num_accepted.min() == 0 < num_accepted.max()  # both ends were reached
        assert (num_accepted.max() == L) or L > 9


def test_largest_budget(rng):
    tree, target = random_case(rng, 6, 15, 64, 1023, 0.5)
    check(tree, target, 15)


def chain(tokens: list[int]) -> DraftTree:
    count = len(tokens)
    ids = torch.tensor(tokens[1:]).reshape(1, count - 1, 1)
    return ops.tree_build(torch.zeros(1, count - 1, 1), ids, torch.tensor(tokens[:1]), count - 1)


def test_full_length_with_token_zero():
    path, num_accepted, next_token = ops.tree_accept(chain([0, 0, 0, 0]), torch.tensor([[0, 0, 0, 0]]), 3)
    assert (path.tolist(), num_accepted.tolist(), next_token.tolist()) == ([[1, 2, 3]], [3], [0])


def test_nothing_accepted():
    path, num_accepted, next_token = ops.tree_accept(chain([5, 6, 7]), torch.tensor([[8, 7, 1]]), 4)
    assert (path.tolist(), num_accepted.tolist(), next_token.tolist()) == ([[-1] * 4], [0], [8])


def test_root_only_tree():
    tree = ops.tree_build(torch.zeros(1, 0, 0), torch.zeros(1, 0, 0, dtype=torch.int64), torch.tensor([3]), 0)
    path, num_accepted, next_token = ops.tree_accept(tree, torch.tensor([[11]]), 0)
    assert path.shape == (1, 0) and num_accepted.tolist() == [0] and next_token.tolist() == [11]


def test_skipped_stream_and_target_without_a_choice():
    tree = chain([5, 6, 7])
    assert ops.tree_accept(tree, torch.tensor([[-1, 7, 1]]), 2)[2].tolist() == [-1]  # -1: argmax of a NaN row
    tree.num_nodes[0] = 0
    path, num_accepted, next_token = ops.tree_accept(tree, torch.tensor([[6, 7, 1]]), 2)
    assert (path.tolist(), num_accepted.tolist(), next_token.tolist()) == ([[-1, -1]], [0], [-1])


def test_slots_past_num_nodes_are_never_read():
    tree = chain([5, 6, 7])
    tree.num_nodes[0] = 2
    tree.parent[0, 2] = 99
    path, num_accepted, next_token = ops.tree_accept(tree, torch.tensor([[6, 7, 1]]), 2)
    assert (path.tolist(), num_accepted.tolist(), next_token.tolist()) == ([[1, -1]], [1], [7])


@BY_VALUE
@pytest.mark.parametrize(("node", "parent"), [(0, 0), (1, -1), (1, 1), (2, 2), (2, 3), (3, 2**31 - 1), (2, -2)])
def test_invalid_parents(node, parent):
    tree = chain([5, 6, 7, 8])
    tree.parent[0, node] = parent
    with pytest.raises(
        ValueError, match="tree_accept: expected a parent index from 0 up to below the node's own index"
    ):
        ops.tree_accept(tree, torch.tensor([[6, 7, 8, 9]]), 3)


@BY_VALUE
def test_path_longer_than_max_depth():
    tree, target = chain([5, 6, 7]), torch.tensor([[6, 7, 1]])
    with pytest.raises(ValueError, match="tree_accept: expected max_depth of at least .* got 1"):
        ops.tree_accept(tree, target, 1)
    assert ops.tree_accept(tree, target, 2)[1].tolist() == [2]


def test_wrong_arguments():
    tree, target = chain([5, 6, 7]), torch.tensor([[6, 7, 1]])
    for change, message in (
        (target.int(), "target_token: expected dtype Long, got Int"),
        (target[:, :2].contiguous(), "target_token: expected shape"),
        (target[0], "target_token: expected shape"),
    ):
        with pytest.raises(ValueError, match=f"tree_accept: {message}"):
            ops.tree_accept(tree, change, 2)
    with pytest.raises(ValueError, match="tree_accept: max_depth: expected at least 0, got -1"):
        ops.tree_accept(tree, target, -1)


@BY_VALUE
def test_more_nodes_than_slots():
    tree, target = chain([5, 6, 7]), torch.tensor([[6, 7, 1]])
    tree.num_nodes[0] = 4
    with pytest.raises(ValueError, match="tree_accept: num_nodes: expected 0 … 3, got 4"):
        ops.tree_accept(tree, target, 2)


def test_opcheck(opcheck, rng):
    tree, target = random_case(rng, 3, 4, 3, 12, 0.8)
    opcheck("tree_accept", tree.token, tree.parent, tree.num_nodes, target, 4)
