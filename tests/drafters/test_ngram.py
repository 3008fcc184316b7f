from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kdtree_nb import Engine
from kdtree_nb.bench.prompt_sets import own_prompts
from kdtree_nb.drafters import DraftContext, NGram
from kdtree_nb.drafters.ngram import SuffixIndex


def draft(drafter, *streams, num_candidates=16, vocab_size=256):
    """Per stream and depth, the candidates (token, log-prob) that could be taken."""
    context = DraftContext(
        tokens=list(streams),
        stream_ids=list(range(len(streams))),
        num_prompt_tokens=[1] * len(streams),
        num_candidates=num_candidates,
        vocab_size=vocab_size,
        device=torch.device("cpu"),
    )
    log_probs, token_ids = drafter.draft(context)
    taken = torch.isfinite(log_probs).tolist()
    pairs = torch.stack([token_ids.double(), log_probs.double()], dim=3).tolist()
    return [
        [[(int(t), p) for (t, p), ok in zip(*level, strict=True) if ok] for level in zip(*stream, strict=True)]
        for stream in zip(pairs, taken, strict=True)
    ]


def chain(levels):
    return [level[0][0] for level in levels if level]


def longest_earlier_match(tokens, min_n, max_n):
    """Where the most recent earlier occurrence of the longest suffix ends, by trying all."""
    for n in range(max_n, min_n - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[len(tokens) - n :]:
                return end
    return None


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 3), st.integers(0, 3))
def test_the_most_recent_longest_match_comes_first(tokens, min_n, more):
    found = draft(NGram(max_n=min_n + more, min_n=min_n, num_matches=1), tokens)[0]
    end = longest_earlier_match(tokens, min_n, min_n + more)
    if end is None:
        assert found == []
    else:
        assert chain(found)[0] == tokens[end]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=80), st.integers(1, 10))
def test_growing_gives_the_same_as_starting_afresh(tokens, stride):
    drafter, grown = NGram(), tokens[:1]
    for start in range(1, len(tokens), stride):
        grown.extend(tokens[start : start + stride])
        assert draft(drafter, grown) == draft(NGram(), list(grown))


def test_a_new_text_on_an_old_stream_forgets_the_old_text():
    drafter = NGram()
    assert chain(draft(drafter, [1, 2, 3, 1, 2])[0])[0] == 3
    assert draft(drafter, [1, 2])[0] == []


def test_a_list_that_shrank_is_indexed_again():
    drafter, tokens = NGram(), [1, 2, 3, 1, 2]
    assert chain(draft(drafter, tokens)[0])[0] == 3
    del tokens[2:]
    tokens.extend([1])
    assert chain(draft(drafter, tokens)[0]) == [2]


def test_no_match_drafts_nothing():
    assert draft(NGram(), [1, 2, 3, 4]) == [[]]
    assert draft(NGram(min_n=3), [1, 2, 9, 1, 2]) == [[]]
    assert draft(NGram(), [1]) == [[]]


def test_a_period_is_continued_beyond_the_end_of_the_text():
    assert chain(draft(NGram(depth=8), [9] + [1, 2, 3] * 5)[0]) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_the_draft_is_not_deeper_than_the_match():
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 3, 4]
    assert chain(draft(NGram(depth=8), text)[0]) == [5, 6]


def test_matches_vote_and_the_most_recent_counts_most():
    text = [1, 2, 7] + [1, 2, 8] + [1, 2, 8] + [1, 2, 9] + [1, 2]
    level = draft(NGram(max_n=2, num_matches=4), text)[0][0]
    assert [t for t, _ in level] == [9, 8]  # weights 1, 1/2 + 1/4; 7 has too few votes
    assert math.exp(level[0][1] - level[1][1]) == pytest.approx(1 / 0.75)


def claims(levels):
    """Per depth, token -> probability."""
    return [{token: pytest.approx(math.exp(log_prob)) for token, log_prob in level} for level in levels]


def test_a_match_goes_on_as_by_the_rule_of_succession():
    text = [1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]
    assert claims(draft(NGram(), text)[0]) == [{4: 3 / 4}, {5: 4 / 5}, {6: 5 / 6}]
    assert claims(draft(NGram(), [5, 6, 0, 6])[0]) == [{0: 1 / 2}]
    loop = [1, 2, 3] * 40
    assert claims(draft(NGram(num_matches=1), loop)[0]) == [{d % 3 + 1: (64 + d) / (65 + d)} for d in range(16)]


def test_matches_that_agree_add_up_and_those_that_do_not_share():
    agree = [1, 2, 8, 5] + [1, 2, 8, 6] + [1, 2]
    assert claims(draft(NGram(num_matches=2), agree)[0]) == [{8: 3 / 4}, {6: 3 / 5.5}]  # votes 2 + 1, then 3 to 1.5
    long, short = [3, 4, 5, 1, 2, 9], [1, 2, 8]
    split = long + short + [3, 4, 5, 1, 2]
    assert claims(draft(NGram(max_n=2), split)[0])[0] == {9: 2.5 / 5.5, 8: 2 / 5.5}  # the older match is the longer


def test_what_is_claimed_comes_true(models):
    model = models("tiny")
    prompts = own_prompts(model.tokenizer.encode).prompts
    texts = Engine(model).generate_ar(prompts, 96, stop_token_ids=())
    claimed, true = [], []
    for prompt, generation in zip(prompts, texts, strict=True):
        drafter, tokens = NGram(), list(prompt)
        for place in range(len(generation.tokens)):
            for level, token in zip(draft(drafter, tokens)[0], generation.tokens[place:], strict=False):
                claimed.append(math.exp(level[0][1]))
                true.append(level[0][0] == token)
                if not true[-1]:
                    break
            tokens.append(generation.tokens[place])
    claimed, true = np.array(claimed), np.array(true)
    assert claimed.sum() == pytest.approx(true.sum(), rel=0.05)
    sure = claimed >= np.median(claimed)
    for part in (sure, ~sure):
        assert claimed[part].mean() == pytest.approx(true[part].mean(), rel=0.1)
    assert surprise(claimed, true) < surprise(np.full(len(true), true.mean()), true)  # any one number says less


def surprise(claimed, true):
    """Mean nats of what came, by what was claimed."""
    return -np.log(np.where(true, claimed, 1 - claimed)).mean()


def test_matches_that_lose_do_not_vote_on_what_follows():
    text = [1, 2, 8, 5] + [1, 2, 9, 6] + [1, 2]
    levels = draft(NGram(max_n=2, num_matches=2), text)[0]
    assert [t for t, _ in levels[0]] == [9] and [t for t, _ in levels[1]] == [6]
    text = [1, 2, 8, 5] + [1, 2, 8, 5] + [1, 2, 9, 6] + [1, 2]
    levels = draft(NGram(max_n=2, num_matches=3), text)[0]
    assert [t for t, _ in levels[0]] == [9, 8] and [t for t, _ in levels[1]] == [6]


def test_candidates_are_cut_to_what_the_tree_can_use():
    text = [1, 2, 8] + [1, 2, 8] + [1, 2, 9] + [1, 2]
    assert len(draft(NGram(), text)[0][0]) == 2
    assert len(draft(NGram(), text, num_candidates=1)[0][0]) == 1


def test_streams_with_and_without_matches_share_a_batch():
    found = draft(NGram(), [1, 2, 3, 1, 2], [4, 5, 6], [0, 0, 0, 0])
    assert chain(found[0])[0] == 3 and chain(found[1]) == [] and chain(found[2])[0] == 0


def test_match_length_and_continuation():
    index = SuffixIndex([1, 2, 3, 9, 2, 3], min_n=1, max_n=2)
    assert index.match_length(3, limit=8) == 2 and index.match_length(3, limit=1) == 1
    assert index.continuation(5, 3) == [3, 3, 3]


@pytest.mark.parametrize(
    "bad", [dict(max_n=0), dict(min_n=3, max_n=2), dict(min_n=0), dict(num_matches=0), dict(depth=0)]
)
def test_bad_settings(bad):
    with pytest.raises(ValueError, match="NGram: expected"):
        NGram(**bad)
