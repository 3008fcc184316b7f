"""What the engine and tree_build rely on, for every drafter: shapes, order, no NaN, distinct ids of the vocabulary."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kdtree_nb import drafters, ops

VOCAB = 19
CONTINUATIONS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7], [0, 0, 0, 0]]
PROMPTS = [[5, 5, 5], [1, 2, 3, 1, 2, 3, 1, 2], [8]]


def make(name):
    return {
        "oracle": lambda: drafters.Oracle(CONTINUATIONS, depth=4),
        "oracle without siblings": lambda: drafters.Oracle(CONTINUATIONS, depth=4, siblings=False),
        "always wrong": lambda: drafters.AlwaysWrong(CONTINUATIONS, depth=4),
        "random": lambda: drafters.Random(depth=4),
        "ngram": lambda: drafters.NGram(depth=4),
    }[name]()


def context(num_candidates, stream_ids=(0, 1, 2), num_emitted=(0, 0, 0), vocab_size=VOCAB):
    return drafters.DraftContext(
        tokens=[PROMPTS[s] + CONTINUATIONS[s][:n] for s, n in zip(stream_ids, num_emitted, strict=True)],
        stream_ids=list(stream_ids),
        num_prompt_tokens=[len(PROMPTS[s]) for s in stream_ids],
        num_candidates=num_candidates,
        vocab_size=vocab_size,
        device=torch.device("cpu"),
    )


NAMES = ["oracle", "oracle without siblings", "always wrong", "random", "ngram"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_candidates", [1, 2, VOCAB])
@pytest.mark.parametrize(("stream_ids", "num_emitted"), [((0, 1, 2), (0, 0, 0)), ((0, 2), (6, 4)), ((1,), (1,))])
def test_candidates_are_valid(name, num_candidates, stream_ids, num_emitted):
    given = context(num_candidates, stream_ids, num_emitted)
    before = [list(tokens) for tokens in given.tokens]
    log_probs, token_ids = make(name).draft(given)
    assert given.tokens == before
    assert log_probs.shape == token_ids.shape
    num_streams, depth, width = log_probs.shape
    assert num_streams == len(stream_ids) and depth <= 4 and width <= num_candidates
    assert log_probs.dtype == torch.float32 and token_ids.dtype == torch.int64
    taken = token_ids[torch.isfinite(log_probs)]
    assert ((taken >= 0) & (taken < VOCAB)).all()
    tree = ops.tree_build(log_probs, token_ids, torch.zeros(num_streams, dtype=torch.int64), 8)  # raises if invalid
    assert (tree.num_nodes >= 1).all()


@pytest.mark.parametrize("name", NAMES)
def test_the_same_context_gives_the_same_draft(name):
    first, second = (make(name).draft(context(8)) for _ in range(2))
    assert torch.equal(first.log_probs, second.log_probs) and torch.equal(first.token_ids, second.token_ids)


def test_oracle_puts_the_true_token_first_and_random_others_behind():
    log_probs, token_ids = make("oracle").draft(context(VOCAB, num_emitted=(2, 0, 3)))
    assert token_ids[0, :, 0].tolist() == [4, 1, 5, 9]
    assert token_ids[1, :2, 0].tolist() == [2, 7] and torch.isneginf(log_probs[1, 2:]).all()
    assert token_ids[2, 0, 0].item() == 0 and torch.isneginf(log_probs[2, 1:]).all()
    assert sorted(token_ids[0, 0].tolist()) == list(range(VOCAB))
    assert not torch.equal(token_ids[0, 0, 1:].sort().values, token_ids[0, 0, 1:])  # the others are shuffled
    spine = log_probs[0, :, 0].double().sum()
    assert spine > log_probs[0, 0, 1]  # the whole spine is heavier than any sibling


def test_oracle_without_siblings_is_a_chain():
    assert make("oracle without siblings").draft(context(VOCAB)).log_probs.shape[2] == 1


def test_always_wrong_never_holds_the_true_token():
    _, token_ids = make("always wrong").draft(context(VOCAB))
    for row, continuation in enumerate(CONTINUATIONS):
        for level, token in enumerate(continuation[:4]):
            assert token not in token_ids[row, level].tolist()
    assert token_ids.shape[2] == VOCAB - 1


def test_random_depends_on_seed_stream_and_position():
    drafts = [
        drafters.Random(depth=4, seed=seed).draft(context(8, (stream,), (emitted,))).token_ids
        for seed, stream, emitted in [(0, 0, 0), (1, 0, 0), (0, 2, 0), (0, 0, 1)]
    ]
    assert all(not torch.equal(drafts[0], other) for other in drafts[1:])
    mass = drafters.Random(depth=4).draft(context(VOCAB)).log_probs.double().exp().sum(dim=2).numpy()
    np.testing.assert_allclose(mass, 1.0, rtol=1e-5)


@pytest.mark.parametrize("name", ["oracle", "always wrong"])
def test_a_stream_without_continuation_is_an_error(name):
    drafter = type(make(name))([1, 2, 3])
    with pytest.raises(ValueError, match="continuation for stream 1"):
        drafter.draft(context(2, (1,), (0,)))
