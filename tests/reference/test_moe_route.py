"""moe_route against a plain loop over sorted pairs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kdtree_nb.reference import moe_route


def route_row(logits, top_k, scoring, bias, renormalize, factor):
    """One row in plain Python: the ids and weights."""
    if scoring == "softmax":
        total = math.fsum(math.exp(x) for x in logits)
        scores = [math.exp(x) / total for x in logits]
    else:
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    chosen = sorted(range(len(scores)), key=lambda e: (-(scores[e] + bias[e]), e))[:top_k]
    total = sum(scores[e] for e in chosen) + 1e-20 if renormalize else 1.0
    return sorted(chosen), [scores[e] / total * factor for e in sorted(chosen)]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("top_k", [1, 2, 7])
def test_against_loop(scoring, renormalize, top_k):
    rng = np.random.default_rng(0)
    logits, bias = rng.normal(size=(20, 7)), rng.normal(size=7)
    logits[:4] = rng.integers(-1, 2, (4, 7))  # ties
    for use in (bias, np.zeros(7)):
        ids, weights = moe_route(logits, top_k, scoring, use if use.any() else None, renormalize, 1.5)
        assert ids.dtype == np.int32
        for row, logit in enumerate(logits):
            want_ids, want_weights = route_row(logit, top_k, scoring, use, renormalize, 1.5)
            assert ids[row].tolist() == want_ids
            assert np.abs(weights[row] - want_weights).max() <= 1e-14


def test_lower_id_wins_ties():
    ids, weights = moe_route(np.zeros((1, 5)), 2)
    assert ids.tolist() == [[0, 1]] and weights.tolist() == [[0.2, 0.2]]
    assert moe_route(np.arange(384)[None] % 2 * 1.0, 8)[0].tolist() == [[1, 3, 5, 7, 9, 11, 13, 15]]


def test_bad_arguments():
    with pytest.raises(ValueError, match="moe_route: expected top_k in 1 … 3, got 4"):
        moe_route(np.zeros((1, 3)), 4)
    with pytest.raises(ValueError, match="moe_route: expected scoring"):
        moe_route(np.zeros((1, 3)), 1, "tanh")
