"""SkipGram: counts of what follows, the same drafts on a device, and its bad inputs."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from kdtree_nb import Engine, load_model, ops
from kdtree_nb.drafters import DeviceDrafter, NGram, SkipGram
from kdtree_nb.drafters.base import DraftContext
from kdtree_nb.native.ops import StreamState

TEXT = [1, 2, 3, 1, 2, 4, 1, 2, 3, 0, 2, 3, 1, 2]
V = 5


def context(*texts, num_candidates=V):
    texts = list(texts)
    lengths = [len(text) for text in texts]
    return DraftContext(texts, list(range(len(texts))), lengths, num_candidates, V, torch.device("cpu"))


def followers(order, last, distance):
    """Counts of the tokens `distance` places behind the places in TEXT where `last` ends."""
    ends = [i for i in range(order - 1, len(TEXT)) if TEXT[i - order + 1 : i + 1] == last]
    return Counter(TEXT[end + distance] for end in ends if end + distance < len(TEXT))


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("last", [[1, 2], [2, 3], [3, 1], [0, 2]])
def test_drafts_what_followed_most_often(order, last):
    draft = SkipGram(TEXT, V, depth=3, order=order, min_count=1).draft(context([4, *last]))
    for level in range(3):
        counts = followers(order, last[-order:], level + 1)
        best = draft.token_ids[0, level].tolist()
        assert [counts[t] for t in best] == sorted((counts[t] for t in range(V)), reverse=True)
        total = sum(counts.values())
        if total:
            probs = draft.log_probs[0, level].exp().tolist()
            assert np.allclose(probs, [counts[t] / total for t in best], atol=0.06)


def test_a_rare_context_falls_back_to_a_shorter_one():
    by_one = SkipGram(TEXT, V, depth=2, order=1, min_count=2).draft(context([0, 2]))
    by_two = SkipGram(TEXT, V, depth=2, order=2, min_count=2).draft(context([0, 2]))  # [0, 2] occurs once
    assert all(torch.equal(a, b) for a, b in zip(by_one, by_two, strict=True))
    common = SkipGram(TEXT, V, depth=2, order=2, min_count=1).draft(context([0, 2]))
    assert not torch.equal(by_two.log_probs, common.log_probs)


def test_an_unknown_context_falls_back_to_none():
    drafter = SkipGram(TEXT, V, depth=1, order=2, min_count=len(TEXT))
    assert drafter.draft(context([3, 3])).token_ids[0, 0, 0] == Counter(TEXT[1:]).most_common(1)[0][0]


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_drafts_alike_on_the_device(order, device):
    drafter = SkipGram(TEXT, V, depth=4, order=order, min_count=1)
    assert isinstance(drafter, DeviceDrafter) and not isinstance(NGram(), DeviceDrafter)
    texts = [TEXT, TEXT[:1], TEXT[:2], [4, 4, 4, 4]]
    last = torch.tensor([len(text) - 1 for text in texts], dtype=torch.int32)
    text = torch.full((4, 20), 3)
    for row, tokens in zip(text, texts, strict=True):
        row[: len(tokens)] = torch.tensor(tokens)
    bonus = torch.tensor([tokens[-1] for tokens in texts])
    state = StreamState(*(t.to(device) for t in (last, bonus, last, last, text)))
    logits = drafter.draft_on_device(state)
    assert logits.shape == (4, 4, V) and logits.device.type == device.type
    want = drafter.draft(context(*texts))
    got = ops.draft_topk(logits.cpu(), V)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_few_candidates():
    assert SkipGram(TEXT, V, depth=3).draft(context(TEXT, TEXT, num_candidates=2)).token_ids.shape == (2, 3, 2)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokens": []}, r"SkipGram: expected tokens of 0 … 4 in one list, got \[\]"),
        ({"tokens": [1, 5]}, "SkipGram: expected tokens of 0 … 4"),
        ({"tokens": [-1]}, "SkipGram: expected tokens of 0 … 4"),
        ({"tokens": [[1]]}, "SkipGram: expected tokens of 0 … 4"),
        ({"order": -1}, "SkipGram: order: expected an integer of at least 0"),
        (
            {"vocab_size": 163840, "order": 2},
            r"vocab_size\^order of at most 67108864, got order 2 and vocab_size 163840",
        ),
        ({"min_count": 0}, "SkipGram: min_count: expected an integer of at least 1, got 0"),
        ({"depth": 0}, "SkipGram: expected a depth of at least 1"),
        ({"tokens": [1.5, 2.0]}, "tokens of 0"),
        ({"tokens": ["a"]}, "tokens of 0"),
        ({"tokens": None}, "tokens of 0"),
        ({"order": 10**9}, "order 1000000000"),
        ({"order": 1.5}, "order: expected an integer"),
        ({"order": True}, "order: expected an integer"),
        ({"min_count": None}, "min_count: expected an integer"),
        ({"vocab_size": "7"}, "vocab_size: expected an integer"),
    ],
)
def test_bad_arguments(changed, message):
    with pytest.raises(ValueError, match=message):
        SkipGram(**{"tokens": TEXT, "vocab_size": V, **changed})


@pytest.mark.parametrize("vocab_size", [7, 330, 332])
def test_a_model_of_another_vocabulary(vocab_size):
    engine = Engine(load_model("tiny2"), drafter=SkipGram([1, 2, 3] * 20, vocab_size, order=1), budget=8)
    with pytest.raises(ValueError, match=f"SkipGram: expected a model of vocab_size {vocab_size}.* got one of 331"):
        engine.generate_ddtree([330], 4)
