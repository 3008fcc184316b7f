"""tree_build against brute force over every prefix, and the errors of its arguments."""

from __future__ import annotations

import numpy as np
import pytest

from kdtree_nb.reference import all_prefixes, tree_brute, tree_build

SIZES = [(L, K) for L in range(1, 5) for K in range(1, 5)] + [(6, 2), (2, 7), (1, 40)]
NUM_STREAMS = 600  # per size: more than 10,000 cases together


def candidates(L: int, K: int, num_streams: int, seed: int = 0):
    """Random marginals, a third of them with few distinct values (ties), a third with zeros; -inf at some row ends."""
    rng = np.random.default_rng([L, K, seed])
    log_probs = -rng.exponential(size=(num_streams, L, K))
    log_probs[::3] = -rng.integers(0, 3, log_probs[::3].shape) * 0.25
    log_probs[1::3] *= rng.random(log_probs[1::3].shape) < 0.6
    log_probs = -np.sort(-log_probs).astype(np.float32)
    cut = rng.integers(0, 3 * K + 1, (num_streams, L, 1))  # a third of the rows are cut, some to nothing
    log_probs[np.arange(K) >= cut] = -np.inf
    token_ids = rng.permuted(np.broadcast_to(np.arange(K), log_probs.shape), axis=-1)  # token 0 is in every row
    bonus = rng.integers(0, K, num_streams)
    budget = rng.integers(0, sum(K**d for d in range(1, L + 1)) + 3, num_streams)
    return log_probs, token_ids, bonus, budget


@pytest.mark.parametrize(("L", "K"), SIZES)
def test_equals_brute_force(L, K):
    case = candidates(L, K, NUM_STREAMS)
    tree, brute = tree_build(*case), tree_brute(*case)
    for name, got, want in zip(tree._fields, tree, brute, strict=True):
        assert got.dtype == want.dtype and (got == want).all(), name


def test_cases_are_hard_enough():
    assert len(SIZES) * NUM_STREAMS >= 10_000
    log_probs, token_ids, bonus, budget = candidates(3, 3, NUM_STREAMS)
    tied = sum(len(set(all_prefixes(row)[0])) < 39 for row in log_probs)
    assert tied > 200
    tree = tree_build(log_probs, token_ids, bonus, budget)
    assert (tree.num_nodes == 1 + budget).sum() > 50 < (tree.num_nodes < 1 + budget).sum()  # enough candidates, or not
    assert np.isneginf(log_probs).any((1, 2)).sum() > 200
    assert (tree.token[:, 1:] == 0).any(1).sum() > 300


@pytest.mark.parametrize(("L", "K"), [(1, 4), (3, 3), (4, 4), (6, 2)])
def test_trees_are_nested(L, K):
    log_probs, token_ids, bonus, budget = candidates(L, K, NUM_STREAMS, seed=1)
    large, small = tree_build(log_probs, token_ids, bonus, 340), tree_build(log_probs, token_ids, bonus, budget)
    for b in range(NUM_STREAMS):
        n = small.num_nodes[b]
        assert n == min(1 + budget[b], large.num_nodes[b])
        for got, want in zip(small[:4], large[:4], strict=True):
            assert (got[b, :n] == want[b, :n]).all()
        words = small.ancestor_bits.shape[-1]
        assert (small.ancestor_bits[b, :n] == large.ancestor_bits[b, :n, :words]).all()
        assert not large.ancestor_bits[b, :n, words:].any()


@pytest.mark.parametrize("budget", [0, 1, 31, 32, 33, 63, 64, 65, 128, 512, 1023])
def test_large_budgets(budget):
    log_probs, token_ids, bonus, _ = candidates(7, 64, 2, seed=2)
    log_probs[np.isneginf(log_probs)] = -9
    tree = tree_build(log_probs, token_ids, bonus, budget)
    assert (tree.num_nodes == 1 + budget).all()
    assert (np.diff(tree.log_prob) <= 0).all()  # best first
    assert (tree.parent[:, 1:] < np.arange(1, 1 + budget)).all() and (tree.parent[:, 1:] >= 0).all()
    siblings = {(b, p, t) for b in (0, 1) for p, t in zip(tree.parent[b], tree.token[b], strict=True)}
    assert len(siblings) == 2 * (1 + budget)


def test_published_order_of_ties():
    """A prefix before its extension, the smaller rank path first: the order of a dictionary."""
    tree = tree_build(np.zeros((1, 3, 2), np.float32), np.array([[[5, 6]] * 3]), [9], 5)
    assert tree.token.tolist() == [[9, 5, 5, 5, 6, 6]]  # (0) (0,0) (0,0,0) (0,0,1) (0,1)
    assert tree.parent.tolist() == [[-1, 0, 1, 2, 2, 1]]


def test_scores_are_summed_from_the_root_in_float64():
    log_probs = np.float32([[[-1], [-(2.0**-53)], [-(2.0**-53)]]])  # each addition of 2^-53 to 1 is rounded away
    tree = tree_build(log_probs, np.zeros((1, 3, 1), int), [0], 3)
    a, b, c = (float(x) for x in log_probs.ravel())
    assert tree.log_prob[0].tolist() == [0.0, a, a + b, (a + b) + c]
    assert (a + b) + c == -1 != a + (b + c)


def test_arrays_are_as_large_as_asked():
    case = candidates(2, 3, 4)[:3]
    assert tree_build(*case, 2).token.shape == (4, 3)
    assert tree_build(*case, [0, 2, 1, 5]).token.shape == (4, 6)
    assert tree_build(*case, 2, max_budget=70).ancestor_bits.shape == (4, 71, 2)


def bad(change):
    log_probs, token_ids = np.float32([[[-1, -2, -3]]]), np.array([[[4, 0, 5]]])
    change(log_probs[0, 0], token_ids[0, 0])
    return log_probs, token_ids, [1], 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row, ids: row.__setitem__(1, np.nan), "without NaN, got NaN"),
        (lambda row, ids: row.__setitem__(0, 0.5), "at most 0, got 0.5"),
        (lambda row, ids: row.__setitem__(2, -1.5), "never increase"),
        (lambda row, ids: ids.__setitem__(2, 4), "a repeated id"),
    ],
)
def test_bad_rows(change, message):
    tree_build(*bad(lambda row, ids: None))
    with pytest.raises(ValueError, match=f"tree_build: .*{message}"):
        tree_build(*bad(change))


@pytest.mark.parametrize(("budget", "max_budget"), [(-1, None), (1024, None), (3, 2), (0, 1024), (0, -1)])
def test_bad_budgets(budget, max_budget):
    case = candidates(2, 3, 1)[:3]
    with pytest.raises(ValueError, match="tree_build: expected (max_budget|budgets) in 0 … .*got"):
        tree_build(*case, budget, max_budget)


def test_bad_shapes():
    with pytest.raises(ValueError, match=r"tree_build: expected log_probs and token_ids \[B, L, K\]"):
        tree_build(np.zeros((1, 2, 3), np.float32), np.zeros((1, 2, 2), int), [0], 1)
