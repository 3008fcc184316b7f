"""moe_route against float64, at ties, with a bias, and with NaN."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from kdtree_nb import reference
from kdtree_nb.native import ops

pytestmark = pytest.mark.usefixtures("on_device")


@pytest.mark.parametrize("shape", [(0, 4, 2), (1, 1, 1), (17, 6, 2), (65, 8, 2), (33, 17, 17), (9, 64, 6), (5, 384, 8)])
@pytest.mark.parametrize(("scoring", "renormalize"), list(itertools.product(["softmax", "sigmoid"], [False, True])))
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_the_reference(shape, scoring, renormalize, with_bias, rng):
    T, E, top_k = shape
    logits = rng.standard_normal((T, E)).astype(np.float32)
    bias = rng.standard_normal(E).astype(np.float32) if with_bias else None
    expert_id, weight = ops.moe_route(
        torch.from_numpy(logits), top_k, scoring, None if bias is None else torch.from_numpy(bias), renormalize, 2.5
    )
    want_id, want_weight = reference.moe_route(logits.astype(np.float64), top_k, scoring, bias, renormalize, 2.5)
    assert np.array_equal(expert_id.numpy(), want_id)
    assert np.all(np.abs(weight.numpy() - want_weight) <= 2e-6 * want_weight)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_ties_go_to_the_lower_id(scoring, rng):
    logits = torch.from_numpy(rng.integers(-1, 2, (300, 20)).astype(np.float32))
    expert_id, weight = ops.moe_route(logits, 5, scoring)
    want_id, _ = reference.moe_route(logits.double().numpy(), 5, scoring)
    assert np.array_equal(expert_id.numpy(), want_id)
    assert weight.isfinite().all()


def test_a_bias_selects_but_does_not_weigh():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    bias = torch.tensor([-9.0, -9.0, 0.0, 0.0])
    expert_id, weight = ops.moe_route(logits, 2, "sigmoid", bias)
    assert expert_id.tolist() == [[2, 3]]
    torch.testing.assert_close(weight, logits[:, 2:].sigmoid())


def test_a_row_has_the_same_bits_among_any_rows(rng, assert_same_bits):
    logits = torch.from_numpy(rng.standard_normal((65, 21)).astype(np.float32))
    together = ops.moe_route(logits, 3, "softmax", None, True, 1.5)
    for t in range(65):
        for alone, row in zip(ops.moe_route(logits[t : t + 1], 3, "softmax", None, True, 1.5), together, strict=True):
            assert_same_bits(alone, row[t : t + 1])


def test_nan_reaches_the_weights_and_ids_stay_valid():
    logits = torch.zeros(3, 6)
    logits[0, 5], logits[1] = float("nan"), float("nan")
    for scoring in ("softmax", "sigmoid"):
        expert_id, weight = ops.moe_route(logits, 2, scoring)
        assert weight[:2].isnan().any(dim=1).all() and weight[2].isfinite().all()
        assert expert_id.min() >= 0 and expert_id.max() <= 5
        assert (expert_id[:, 0] < expert_id[:, 1]).all()


def test_minus_infinity_is_never_preferred():
    logits = torch.full((1, 6), -float("inf"))
    logits[0, 4], logits[0, 2] = 0.0, -1.0
    expert_id, weight = ops.moe_route(logits, 3, renormalize=True)
    assert expert_id.tolist() == [[0, 2, 4]] and weight[0, 0] == 0 and weight.sum() == pytest.approx(1.0)


def test_opcheck(opcheck):
    opcheck("moe_route", torch.randn(3, 6), None, 2, 0, True, 1.0)
    opcheck("moe_route", torch.randn(3, 6), torch.randn(6), 2, 1, False, 2.5)


@pytest.mark.parametrize(
    ("logits", "top_k", "scoring", "bias", "message"),
    [
        (torch.zeros(3, 6), 7, "softmax", None, "moe_route: top_k: expected 1 … 6, got 7"),
        (torch.zeros(3, 6), 0, "softmax", None, "moe_route: top_k: expected 1 … 6, got 0"),
        (torch.zeros(3, 6), 2, "relu", None, r"moe_route: scoring: expected one of .*'sigmoid'.*, got 'relu'"),
        (torch.zeros(3, 6), 2, "sigmoid", torch.zeros(5), r"moe_route: bias: expected shape .*6.*got .*5"),
        (torch.zeros(3, 6).bfloat16(), 2, "softmax", None, "moe_route: logits: expected dtype Float, got BFloat16"),
    ],
)
def test_bad_input_is_named(logits, top_k, scoring, bias, message):
    with pytest.raises(ValueError, match=message):
        ops.moe_route(logits, top_k, scoring, bias)


@pytest.mark.parametrize(
    ("shape", "groups"),
    [((1, 4, 2), (2, 1)), ((33, 12, 3), (4, 2)), ((17, 256, 8), (8, 4)), ((9, 60, 6), (3, 3)), ((5, 384, 8), (48, 5))],
)
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_groups_equal_the_reference(shape, groups, scoring, rng):
    T, E, top_k = shape
    logits, bias = rng.standard_normal((T, E)).astype(np.float32), rng.standard_normal(E).astype(np.float32) / 2
    expert_id, weight = ops.moe_route(
        torch.from_numpy(logits), top_k, scoring, torch.from_numpy(bias), True, 2.5, None, *groups
    )
    want_id, want_weight = reference.moe_route(logits.astype(np.float64), top_k, scoring, bias, True, 2.5, *groups)
    assert np.array_equal(expert_id.numpy(), want_id)
    assert np.all(np.abs(weight.numpy() - want_weight) <= 2e-6 * want_weight)
    assert (np.unique(want_id[0] // (E // groups[0])).size) <= groups[1]


def test_equal_groups_go_to_the_lower_one_and_the_two_best_of_a_group_decide():
    logits = torch.tensor([[5.0, -5.0, 1.0, 1.0, 1.0, 1.0]])
    expert_id, _ = ops.moe_route(logits, 2, "sigmoid", num_groups=3, topk_groups=1)
    assert expert_id.tolist() == [[2, 3]]


def test_nan_in_a_group_reaches_the_weights():
    logits = torch.zeros(1, 6)
    logits[0, 4] = float("nan")
    expert_id, weight = ops.moe_route(logits, 2, "sigmoid", num_groups=3, topk_groups=1)
    assert expert_id.tolist() == [[4, 5]] and weight.isnan().any()


@pytest.mark.parametrize(
    ("groups", "top_k", "message"),
    [((4, 1), 2, "num_groups"), ((6, 2), 2, "num_groups"), ((0, 1), 2, "num_groups"), ((3, 4), 2, "topk_groups"),
     ((3, 0), 2, "topk_groups"), ((3, 1), 3, "top_k")],
)  # fmt: skip
def test_bad_groups(groups, top_k, message):
    with pytest.raises(ValueError, match=f"moe_route: {message}: expected"):
        ops.moe_route(torch.zeros(2, 6), top_k, "sigmoid", num_groups=groups[0], topk_groups=groups[1])
