"""draft_topk against torch's log_softmax, with ties, -inf, NaN."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from kdtree_nb.reference import draft_topk


@pytest.mark.parametrize("vocab", [1, 2, 31, 64, 331])
def test_against_torch(vocab):
    logits = np.random.default_rng(0).normal(size=(2, 3, vocab)) * 5
    want = torch.log_softmax(torch.from_numpy(logits), dim=-1).numpy()
    for k in {1, min(2, vocab), vocab}:
        log_probs, token_ids = draft_topk(logits, k)
        assert log_probs.shape == token_ids.shape == (2, 3, k)
        assert log_probs.dtype == np.float32 and token_ids.dtype == np.int64
        assert np.abs(log_probs - -np.sort(-want)[..., :k]).max() <= 1e-5
        assert np.abs(np.take_along_axis(want, token_ids, -1) - log_probs).max() <= 1e-5
        assert (log_probs <= 0).all()


def test_equal_logits_give_the_lower_id_first():
    log_probs, token_ids = draft_topk(np.array([[[1, 5, 5, 0, 5, 1]]]), 5)
    assert token_ids.tolist() == [[[1, 2, 4, 0, 5]]]
    assert log_probs[0, 0, 0] == log_probs[0, 0, 2] > log_probs[0, 0, 3] == log_probs[0, 0, 4]
    assert draft_topk(np.arange(331)[None, None] % 2, 331)[1].ravel().tolist() == [*range(1, 331, 2), *range(0, 331, 2)]


def test_never_above_zero_and_rows_never_increase():
    logits = np.random.default_rng(1).normal(size=(4, 50, 40)) * 40
    logits[0] = np.round(logits[0] / 40)
    log_probs, _ = draft_topk(logits, 40)
    assert (log_probs <= 0).all() and (np.diff(log_probs) <= 0).all() and (log_probs[:, :, 0] == 0).any()


def test_minus_infinity():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log_probs, token_ids = draft_topk(np.array([[[-np.inf, 2, -np.inf, 2], [-np.inf] * 4]]), 4)
    assert np.abs(log_probs[0, 0, :2] + np.log(2)).max() <= 1e-6
    assert (log_probs[0, 0, 2:] == -np.inf).all() and (log_probs[0, 1] == -np.inf).all()
    assert token_ids.tolist() == [[[1, 3, 0, 2], [0, 1, 2, 3]]]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_plus_infinity(bad):
    with pytest.raises(ValueError, match="draft_topk: expected logits that are finite or -inf"):
        draft_topk(np.array([[[0.0, bad, 1.0]]]), 1)


@pytest.mark.parametrize("k", [0, 4])
def test_number_of_candidates(k):
    with pytest.raises(ValueError, match=f"draft_topk: expected num_candidates in 1 … 3, got {k}"):
        draft_topk(np.zeros((1, 1, 3)), k)
