from __future__ import annotations

import numpy as np
import pytest

from kdtree_nb import reference
from kdtree_nb.reference.words import NAN_WORD, NO_WORD, tokens_of


def test_words_order_like_logits_and_then_lower_ids():
    logits = np.array([-np.inf, -3.0, -1e-45, -0.0, 0.0, 1e-45, 2.0, 2.0, np.inf], np.float32)
    ids = np.array([3, 1, 7, 6, 5, 0, 9, 2, 4])
    words = reference.words_of(logits, ids)
    assert np.array_equal(np.argsort(words), np.arange(9))
    found, back = tokens_of(words)
    assert np.array_equal(found, logits) and np.array_equal(back, ids)
    assert (words > NO_WORD).all() and (words < NAN_WORD).all()


def test_merging_gives_draft_topk_of_all_logits():
    rng = np.random.default_rng(4)
    logits = rng.standard_normal((5, 256)).astype(np.float32) * 2
    logits[0, :200] = -np.inf
    ranks = []
    for ids in np.split(np.arange(256), 4):
        mine = logits[:, ids]
        best = np.argsort(-mine, axis=1, kind="stable")[:, :6]
        halves = mine.reshape(5, 2, 32)
        largest = halves.max(2)
        with np.errstate(invalid="ignore"):
            total = np.nan_to_num(np.exp(halves - largest[..., None])).sum(2)
        words = reference.words_of(np.take_along_axis(mine, best, 1), ids[best])
        ranks.append(np.concatenate([words, reference.segment_words(largest, total)], axis=1))
    log_probs, ids = reference.draft_topk_merge(np.stack(ranks), 6)
    want = reference.draft_topk(logits, 6)
    assert np.array_equal(ids, want[1]) and np.allclose(log_probs, want[0], rtol=0, atol=1e-6)
    ranks[2][3, 7] = reference.segment_words(np.float32(np.nan), np.float32(0))
    with pytest.raises(ValueError, match="got NaN"):
        reference.draft_topk_merge(np.stack(ranks), 6)
    with pytest.raises(ValueError, match="expected 8 segments, got 4"):
        reference.draft_topk_merge(np.stack(ranks[:2]), 6)


def test_sampling_among_some_tokens_never_gives_another():
    words = reference.words_of(np.array([[1.0, 0.5, -2.0]], np.float32), np.array([[30, 4, 17]]))
    zeros, one = np.zeros(1, np.int32), np.ones(1)
    found = {
        int(tokens_of(reference.sample_among(words, np.ones(1), zeros, zeros + p, one, zeros, one, zeros, 40))[1][0])
        for p in range(400)
    }
    assert found == {30, 4, 17}
