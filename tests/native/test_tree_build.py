"""tree_build against brute force, against the reference's heap where brute force is too large, and its bad inputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kdtree_nb import ops, reference
from kdtree_nb.tree import DraftTree

pytestmark = pytest.mark.usefixtures("on_device")
BY_VALUE = pytest.mark.cpu_only("a GPU does not look at values: tests/cuda/test_bad_values.py")

SIZES = [(1, 1), (1, 3), (1, 33), (2, 2), (2, 5), (3, 1), (3, 3), (4, 2), (3, 4), (7, 2)]
NUM_STREAMS = 1050  # per size
BUDGETS = (0, 1, 2, 7, 16, 31, 32, 33, 63, 64, 65, 127, 128, 512, 1023)


def draw(L: int, K: int, num_streams: int, seed: int, vocab_size: int = 0):
    """(log_probs f32, token_ids i64, bonus i64): continuous, of few values (ties), all equal, cut by -inf."""
    rng = np.random.default_rng([seed, L, K])
    log_probs = -rng.exponential(size=(num_streams, L, K))
    log_probs[1::4] = -0.5 * rng.integers(0, 4, log_probs[1::4].shape)
    log_probs[2::4] = -rng.integers(0, 2, (len(log_probs[2::4]), 1, 1))
    log_probs[::3][rng.random(log_probs[::3].shape) < 0.3] = -np.inf
    log_probs = -np.sort(-log_probs.astype(np.float32), axis=-1)
    ids = np.argsort(rng.random((num_streams, L, max(K, vocab_size))), axis=-1)[..., :K]  # distinct; 0 among them
    return log_probs, ids, rng.integers(0, 3, num_streams)


def build(log_probs, token_ids, bonus, budget, max_budget=None) -> DraftTree:
    if not isinstance(budget, int):
        budget = torch.from_numpy(np.asarray(budget, np.int32))
    tensors = (torch.from_numpy(np.ascontiguousarray(array)) for array in (log_probs, token_ids, bonus))
    return ops.tree_build(*tensors, budget, max_budget)


def assert_same(tree: DraftTree, want: reference.Tree):
    for name in want._fields:
        got = getattr(tree, name).numpy()
        assert got.dtype == getattr(want, name).dtype and np.array_equal(got, getattr(want, name)), name


@pytest.mark.parametrize(("L", "K"), SIZES)
def test_equals_brute_force(L, K):
    case = draw(L, K, NUM_STREAMS, seed=1)
    num_prefixes = sum(K**d for d in range(1, L + 1))
    budget = np.random.default_rng(L + K).integers(0, min(num_prefixes + 3, 60), NUM_STREAMS)
    assert_same(build(*case, budget), reference.tree_brute(*case, budget))


def test_the_cases_are_hard_enough():
    assert len(SIZES) * NUM_STREAMS >= 10_000
    log_probs, ids, _ = draw(3, 3, NUM_STREAMS, seed=1)
    scores = [reference.all_prefixes(one)[0] for one in log_probs]
    assert sum(len(np.unique(one)) < len(one) for one in scores) > NUM_STREAMS // 2  # tied
    assert np.isneginf(log_probs).any((1, 2)).sum() > 100 and (ids == 0).all(2).sum() == 0 < (ids == 0).any(2).sum()


@pytest.mark.parametrize("budget", BUDGETS)
def test_equals_the_reference_at_every_budget(budget):
    log_probs, ids, bonus = draw(15, 64, 8, seed=2, vocab_size=500)
    assert_same(build(log_probs, ids, bonus, budget), reference.tree_build(log_probs, ids, bonus, budget))


def test_budgets_of_a_batch_and_fillers():
    log_probs, ids, bonus = draw(5, 40, len(BUDGETS), seed=3)
    tree = build(log_probs, ids, bonus, BUDGETS, 1023)
    assert_same(tree, reference.tree_build(log_probs, ids, bonus, np.array(BUDGETS), 1023))
    for stream, count in enumerate(tree.num_nodes.tolist()):
        assert (tree.token[stream, count:] == -1).all() and torch.isneginf(tree.log_prob[stream, count:]).all()
        assert not tree.ancestor_bits[stream, count:].any()


def test_trees_are_nested():
    log_probs, ids, bonus = draw(15, 64, 8, seed=4)
    whole = build(log_probs, ids, bonus, 1023)
    for budget in BUDGETS:
        tree = build(log_probs, ids, bonus, budget)
        for stream, count in enumerate(tree.num_nodes.tolist()):
            assert count == min(1 + budget, int(whole.num_nodes[stream]))
            for name in ("token", "parent", "depth", "log_prob"):
                assert torch.equal(getattr(tree, name)[stream, :count], getattr(whole, name)[stream, :count]), name
            words = tree.ancestor_bits.shape[-1]
            assert torch.equal(tree.ancestor_bits[stream, :count], whole.ancestor_bits[stream, :count, :words])


def test_scores_are_sums_in_float64_from_the_root():
    log_probs, ids, bonus = draw(15, 64, 4, seed=5)
    tree = build(log_probs, ids, bonus, 512)
    for stream in range(4):
        for node in range(1, int(tree.num_nodes[stream])):
            parent, depth = int(tree.parent[stream, node]), int(tree.depth[stream, node])
            rank = np.flatnonzero(ids[stream, depth - 1] == int(tree.token[stream, node])).item()
            added = float(tree.log_prob[stream, parent]) + float(log_probs[stream, depth - 1, rank])
            assert float(tree.log_prob[stream, node]) == added


def test_ties_take_the_smaller_rank_path_and_a_prefix_first():
    ids = np.arange(6).reshape(1, 2, 3)
    tree = build(np.zeros((1, 2, 3), np.float32), ids, np.array([9]), 11)
    paths = [[int(tree.token[0, node]) for node in tree.path(0, i)[1:]] for i in range(1, 12)]
    assert paths == [[0], [0, 3], [0, 4], [0, 5], [1], [1, 3], [1, 4], [1, 5], [2], [2, 3], [2, 4]]


def test_one_int_is_every_streams_budget():
    case = draw(4, 5, 3, seed=6)
    for budget in (0, 1, 17):
        one, each = build(*case, budget), build(*case, [budget] * 3)
        assert all(torch.equal(getattr(one, name), getattr(each, name)) for name in reference.Tree._fields)
        assert one.max_budget == budget


@pytest.mark.parametrize(("B", "L", "K"), [(0, 3, 4), (2, 0, 4), (2, 3, 0), (2, 0, 0)])
def test_nothing_drafted_gives_root_only_trees(B, L, K):
    case = (np.zeros((B, L, K), np.float32), np.zeros((B, L, K), np.int64), np.arange(B))
    assert_same(build(*case, 5), reference.tree_build(*case, 5, 5))


def test_only_impossible_candidates_give_root_only_trees():
    log_probs, ids, bonus = draw(3, 4, 2, seed=7)
    log_probs[:] = -np.inf
    assert build(log_probs, ids, bonus, 9).num_nodes.tolist() == [1, 1]


def test_rows_wider_than_the_budget_and_huge_ids():
    log_probs, ids, bonus = draw(3, 3000, 2, seed=8)
    ids = ids + 2**62  # beyond 32 bits, and alike in the upper half
    assert_same(build(log_probs, ids, bonus, 100), reference.tree_build(log_probs, ids, bonus, 100))


def bad(field: str, index: tuple, value):
    case = dict(zip(("log_probs", "token_ids", "bonus"), draw(3, 5, 4, seed=9), strict=True))
    case["log_probs"][:] = -np.arange(5)
    case[field][index] = value
    return case


@BY_VALUE
@pytest.mark.parametrize(
    ("field", "index", "value"),
    [
        ("log_probs", (2, 1, 3), np.nan),
        ("log_probs", (2, 0, 0), np.nan),
        ("log_probs", (2, 2, 4), np.nan),
        ("log_probs", (2, 0, 0), 1e-30),
        ("log_probs", (2, 2, 4), -2.5),
        ("token_ids", (2, 2, slice(3, 5)), 7),
        ("token_ids", (2, 0, slice(0, 5, 4)), 0),
        ("token_ids", (2, 1, 2), -1),
    ],
)
def test_bad_candidates(field, index, value):
    with pytest.raises(ValueError, match="tree_build: stream 2: expected log-probs that are non-increasing"):
        build(**bad(field, index, value), budget=8)


@BY_VALUE
def test_repeats_in_wide_rows_are_found_wherever_they_are():
    log_probs, ids, bonus = draw(2, 1000, 1, seed=10)
    rng = np.random.default_rng(0)
    for first, second in rng.choice(1000, (50, 2)):
        case = ids.copy()
        case[0, 1, first] = case[0, 1, second]
        if first == second:
            build(log_probs, case, bonus, 5)
        else:
            with pytest.raises(ValueError, match="stream 0"):
                build(log_probs, case, bonus, 5)
    same_rows = np.broadcast_to(ids[:, :1], ids.shape)
    assert build(log_probs, same_rows, bonus, 5).num_nodes.item() > 1  # the same id at two depths is no repeat


def test_bad_largest_budgets():
    case = draw(2, 3, 2, seed=11)
    for budget, max_budget in ((-1, None), (1024, None), (3, 1024), (2**40, None), (0, -1)):
        with pytest.raises(ValueError, match="tree_build: max_budget: expected 0 … 1023, got"):
            build(*case, budget, max_budget)


@BY_VALUE
def test_bad_budgets_and_bonus_of_a_stream():
    case = draw(2, 3, 2, seed=11)
    for budget in ([3, -1], [3, 9]):
        with pytest.raises(ValueError, match=f"stream 1: expected a budget in 0 … 8 .* got budget {budget[1]}"):
            build(*case, budget, 8)
    with pytest.raises(ValueError, match="stream 1: .*bonus -7"):
        build(case[0], case[1], np.array([0, -7]), 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a | {"log_probs": a["log_probs"].double()}, "log_probs: expected dtype Float, got Double"),
        (lambda a: a | {"log_probs": a["log_probs"][0]}, r"log_probs: expected shape \[B, L, K\]"),
        (lambda a: a | {"token_ids": a["token_ids"].int()}, "token_ids: expected dtype Long, got Int"),
        (
            lambda a: a | {"token_ids": a["token_ids"][:, :1].contiguous()},
            r"token_ids: .*\[2, 3, 4\].* got \[2, 1, 4\]",
        ),
        (lambda a: a | {"token_ids": a["token_ids"].mT.contiguous().mT}, "token_ids: expected a contiguous tensor"),
        (lambda a: a | {"bonus": a["bonus"][:1]}, "bonus: expected shape"),
        (lambda a: a | {"budget": torch.tensor([3, 4])}, "budget: expected dtype Int, got Long"),
        (lambda a: a | {"budget": torch.tensor([3], dtype=torch.int32)}, "budget: expected shape"),
    ],
)
def test_wrong_arguments(change, message):
    log_probs, ids, bonus = (torch.from_numpy(array) for array in draw(3, 4, 2, seed=12))
    case = {"log_probs": log_probs, "token_ids": ids, "bonus": bonus, "budget": torch.tensor([3, 4], dtype=torch.int32)}
    ops.tree_build(**case)
    with pytest.raises(ValueError, match=f"tree_build: {message}"):
        ops.tree_build(**change(case))


def test_opcheck(opcheck):
    log_probs, ids, bonus = (torch.from_numpy(array) for array in draw(3, 4, 2, seed=13))
    opcheck("tree_build", log_probs, ids, bonus, torch.tensor([3, 70], dtype=torch.int32), 70)


@pytest.mark.parametrize("budget", [1.5, "8", None, np.int64(8)])
def test_budgets_of_other_types(budget):
    candidates = torch.zeros(1, 1, 1), torch.zeros(1, 1, 1, dtype=torch.int64), torch.tensor([0])
    with pytest.raises(ValueError, match="budget: expected an int or an i32 tensor"):
        ops.tree_build(*candidates, budget)
