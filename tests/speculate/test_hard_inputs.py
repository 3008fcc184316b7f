"""Inputs that broke other engines; each docstring begins with what it is that broke them.

Those of ranks stand in `tests/parallel`, of captured steps in `test_device_*.py`, of sampling in `test_sampling.py`.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from kdtree_nb import Engine, drafters, ops
from kdtree_nb.drafters import DraftCandidates
from kdtree_nb.errors import NonFiniteError
from kdtree_nb.model import build_model
from kdtree_nb.tiny2 import tiny2_config, tiny2_weights
from tests.speculate.shared import NUM_TOKENS, assert_same, poisoned_model


@pytest.fixture
def unseen(prompt, want):
    """A token that occurs neither in the prompt nor in the text."""
    return next(t for t in range(331) if t not in prompt and t not in want.tokens)


def candidates(log_probs, token_ids):
    return DraftCandidates(torch.tensor(log_probs, dtype=torch.float32), torch.tensor(token_ids))


def decode(model, drafter, prompt, budget=16, num_tokens=NUM_TOKENS, **options):
    engine = Engine(model, drafter, max_seq_len=options.pop("max_seq_len", None))
    options.setdefault("stop_token_ids", ())
    return engine.generate_ddtree(prompt, num_tokens, budget=budget, return_logits=True, **options)


def test_nan_drafter_logits(tiny2, prompt, want, script):
    """NaN or -inf drafter logits: NaN is an error that names stream and position; the engine goes on working."""
    broken = script(lambda c: candidates([[[-0.1], [float("nan")]]], [[[1], [2]]]))
    engine = Engine(tiny2, broken, budget=4)
    with pytest.raises(NonFiniteError, match=f"stream 0: .* position {len(prompt) + 1} "):
        engine.generate_ddtree(prompt, NUM_TOKENS)
    engine.drafter = drafters.Oracle(want.tokens)
    assert_same(engine.generate_ddtree(prompt, NUM_TOKENS, return_logits=True), want)


def test_nan_drafter_logits_name_the_right_stream(tiny2, prompts, script):
    """NaN or -inf drafter logits: in a batch that has shrunk the stream is named by its place in the call."""

    def answer(context):
        log_probs = torch.full((len(context.tokens), 1, 1), -0.5)
        if len(context.tokens) == 2:
            log_probs[1] = torch.nan
        return DraftCandidates(log_probs, torch.zeros(log_probs.shape, dtype=torch.int64))

    prompt = prompts["tiny2"]
    with pytest.raises(NonFiniteError, match="stream 2: "):
        Engine(tiny2, script(answer), budget=2).generate_ddtree(prompt, [30, 2, 30])


def test_minus_infinity_drafter_logits(tiny2, prompt, want, script):
    """NaN or -inf drafter logits: -inf is a candidate that is never taken, wherever it stands."""
    inf = float("inf")
    nodes = []
    drafter = script(lambda c: candidates([[[-0.1, -inf], [-inf, -inf], [-0.1, -0.2]]], [[[1, 2], [3, 4], [5, 6]]]))
    got = decode(tiny2, drafter, prompt, on_step=lambda r: nodes.append(r.tree.num_nodes.item()))
    assert_same(got, want)
    assert max(nodes) == 2


def test_top_k_of_nan_logits_names_the_stream(tiny2, prompts, script):
    """NaN or -inf drafter logits: a drafter that hands NaN logits to draft_topk stops with an error, not tokens."""

    def answer(context):
        logits = torch.zeros(len(context.tokens), 2, context.vocab_size)
        logits[-1, 1, 3] = torch.nan
        return DraftCandidates(*ops.draft_topk(logits, 4))

    with pytest.raises((NonFiniteError, ValueError), match="draft_topk.*NaN"):
        Engine(tiny2, script(answer), budget=4).generate_ddtree(prompts["tiny2"], 4)


def relabelled(old, new, device):
    """tiny2 with two token ids exchanged: it emits `new` where it would have emitted `old`."""
    order = np.arange(tiny2_config().vocab_size)
    order[[old, new]] = order[[new, old]]
    weights = tiny2_weights()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][order]
    return build_model(tiny2_config(), weights, device), order


def test_token_id_0_inside_a_tree(prompt, want, device):
    """token id 0 inside a tree: it is an ordinary token, drafted, verified and emitted."""
    model, order = relabelled(want.tokens[3], 0, device)
    renamed = order[prompt].tolist()
    expected = Engine(model).generate_ar(renamed, NUM_TOKENS, return_logits=True)
    assert expected.tokens == order[want.tokens].tolist() and 0 in expected.tokens
    records = []
    got = decode(model, drafters.Oracle(expected.tokens), renamed, on_step=records.append)
    assert_same(got, expected)
    assert got.stats.num_target_forwards == 3
    accepted = [r.tree.token[0, node].item() for r in records for node in r.accepted_path[0]]
    assert 0 in accepted


def test_target_emits_the_mask_token_of_the_drafter(tiny2, prompt, want):
    """the target emitting the drafter's mask token: the engine knows no mask token, so the text keeps it."""
    mask = want.tokens[5]
    drafter = drafters.Oracle([mask if t == mask else t for t in want.tokens])
    got = decode(tiny2, drafter, prompt)
    assert_same(got, want)
    assert mask in got.tokens


@pytest.mark.parametrize("right", [True, False])
def test_tree_of_depth_1(tiny2, prompt, want, right):
    """tree of depth 1: the root and some children, one of them right, or none."""
    make = drafters.Oracle if right else drafters.AlwaysWrong
    got = decode(tiny2, make(want.tokens, depth=1), prompt)
    assert_same(got, want)
    assert got.stats.tokens_per_step == (2.0 if right else 1.0)


def test_pure_chain(tiny2, prompt, want):
    """a pure chain: one candidate per depth."""
    got = decode(tiny2, drafters.Oracle(want.tokens, depth=11, siblings=False), prompt, budget=31)
    assert_same(got, want)
    assert got.stats.nodes_per_step == [12, 12] and got.stats.accepted_per_step == [11, 11]


@pytest.mark.parametrize("shape", [(1, 0, 0), (1, 3, 0), (1, 0, 3)])
def test_root_only_tree(tiny2, prompt, want, script, shape):
    """root-only tree (nothing drafted): no depths, or no candidates."""
    empty = DraftCandidates(torch.zeros(shape), torch.zeros(shape, dtype=torch.int64))
    got = decode(tiny2, script(lambda c: empty), prompt)
    assert_same(got, want)
    assert got.stats.nodes_per_step == [1] * NUM_TOKENS


def test_accepted_length_0_and_full(tiny2, prompt, want):
    """accepted length 0 and full length: in every step of one generation."""
    rejected = decode(tiny2, drafters.AlwaysWrong(want.tokens, depth=5), prompt)
    assert_same(rejected, want)
    assert rejected.stats.accepted_per_step == [0] * NUM_TOKENS
    full = decode(tiny2, drafters.Oracle(want.tokens, depth=5), prompt)
    assert_same(full, want)
    assert full.stats.accepted_per_step == [5] * 4


@pytest.mark.parametrize("budget", [0, 1, 31, 32, 33, 63, 64, 65, 1023])
def test_budgets(tiny2, prompt, want, budget, shuffled_oracle):
    """budget 0, 1, 31–33, 63–65, 1023: never more nodes than that, and those where there are candidates for them."""
    got = decode(tiny2, shuffled_oracle([want.tokens], num_candidates=64), prompt, budget)
    assert_same(got, want)
    assert got.stats.nodes_per_step[0] == budget + 1
    assert max(got.stats.nodes_per_step) == budget + 1


def test_streams_of_different_tree_sizes_and_lengths(tiny2, prompts, ar, shuffled_oracle):
    """streams of different tree sizes and lengths in a batch: each has its own budget and its own limit."""
    expected = ar("tiny2")
    drafter = shuffled_oracle([g.tokens for g in expected], num_candidates=8)
    counts, budgets = [24, 9, 17], [65, 0, 7]
    got = decode(tiny2, drafter, prompts["tiny2"], budgets, counts)
    for g, w, count, budget in zip(got, expected, counts, budgets, strict=True):
        assert g.tokens == w.tokens[:count] and torch.equal(g.logits, w.logits[:count])
        assert g.stats.nodes_per_step[0] == budget + 1


def test_batch_shrinks_from_10_to_3_to_1(tiny2, prompts, ar, shuffled_oracle):
    """a batch that shrinks from 10 to 3 to 1: streams leave as they finish, the others do not notice."""
    order = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    counts = [24, 5, 4, 6, 14, 3, 5, 4, 12, 6]
    expected = [ar("tiny2")[i] for i in order]
    alive = []
    drafter = shuffled_oracle([g.tokens for g in expected])
    got = decode(
        tiny2, drafter, [prompts["tiny2"][i] for i in order], 16, counts, on_step=lambda r: alive.append(r.stream_ids)
    )
    for g, w, count in zip(got, expected, counts, strict=True):
        assert g.tokens == w.tokens[:count] and torch.equal(g.logits, w.logits[:count])
    assert alive[0] == list(range(10)) and alive[-1] == [0]
    assert [0, 4, 8] in alive


def test_prompt_length_1(tiny2, want, shuffled_oracle):
    """prompt length 1: nothing to prefill."""
    expected = Engine(tiny2).generate_ar([7], NUM_TOKENS, return_logits=True)
    assert expected.stats.num_prefill_forwards == 0
    assert_same(decode(tiny2, shuffled_oracle([expected.tokens]), [7]), expected)


def test_prompt_length_equal_to_1_plus_budget(tiny2, shuffled_oracle):
    """prompt length equal to 1 + budget: as long as the tree."""
    prompt = list(range(17))
    expected = Engine(tiny2).generate_ar(prompt, NUM_TOKENS, return_logits=True)
    assert_same(decode(tiny2, shuffled_oracle([expected.tokens]), prompt, budget=16), expected)


def test_identical_prompts_in_one_batch(tiny2, prompt, want, shuffled_oracle):
    """identical prompts in one batch: the streams stay apart, also when their drafts differ."""
    wrong = [(t + 1) % 331 for t in want.tokens]
    for got in decode(tiny2, shuffled_oracle([want.tokens, wrong, want.tokens]), [prompt] * 3):
        assert_same(got, want)


@pytest.mark.parametrize("room", [1, 2, 5, 8, 9, 24])
def test_max_seq_len_reached_in_mid_tree(tiny2, prompt, want, room):
    """max_seq_len reached in mid-tree: stop cleanly with exactly the tokens AR gives, and forward nothing beyond it."""
    max_seq_len = len(prompt) + room
    engine = Engine(tiny2, max_seq_len=max_seq_len)
    expected = engine.generate_ar(prompt, 100, return_logits=True)
    assert expected.tokens == want.tokens[:room] and expected.finish_reason == "max_seq_len"
    deepest = []
    drafter = drafters.Oracle(want.tokens + [0] * 40, depth=7)
    got = decode(
        tiny2, drafter, prompt, 64, 100, max_seq_len=max_seq_len, on_step=lambda r: deepest.append(r.tree.depth.max())
    )
    assert_same(got, expected)
    positions, start = [], len(prompt) - 1
    for depth, accepted in zip(deepest, got.stats.accepted_per_step, strict=True):
        positions.append(start + int(depth))
        start += accepted + 1
    assert max(positions) < max_seq_len


def test_max_seq_len_of_one_stream_in_a_batch(tiny2, prompts, ar, shuffled_oracle):
    """max_seq_len reached in mid-tree: the longer prompt stops there, the shorter ones go on."""
    expected = ar("tiny2")
    longest = max(map(len, prompts["tiny2"]))
    got = decode(tiny2, shuffled_oracle([g.tokens for g in expected]), prompts["tiny2"], max_seq_len=longest + 10)
    for g, w, prompt in zip(got, expected, prompts["tiny2"], strict=True):
        room = longest + 10 - len(prompt)
        assert g.tokens == w.tokens[:room]
        assert g.finish_reason == ("max_seq_len" if room < NUM_TOKENS else "length")


@pytest.mark.parametrize("depth", [1, 3, 23])
def test_eos_inside_an_accepted_path(tiny2, prompt, want, depth):
    """EOS inside an accepted path (nothing after it is emitted): also where it is the path's first or last node."""
    eos = want.tokens[10]
    end = want.tokens.index(eos) + 1
    expected = Engine(tiny2).generate_ar(prompt, NUM_TOKENS, stop_token_ids=[eos], return_logits=True)
    assert expected.tokens == want.tokens[:end] and expected.finish_reason == "eos"
    got = decode(tiny2, drafters.Oracle(want.tokens, depth=depth), prompt, 32, stop_token_ids=[eos])
    assert_same(got, expected)
    assert got.stats.num_tokens == end
    assert sum(got.stats.accepted_per_step) == end - (end - 1) // (depth + 1) - (end % (depth + 1) == 0)


def test_the_eos_of_the_configuration_stops(prompt, want, unseen, device):
    """EOS inside an accepted path: without further ado it is the model's own."""
    eos = want.tokens[10]
    model = build_model(dataclasses.replace(tiny2_config(), eos_token_ids=(eos, unseen)), tiny2_weights(), device)
    got = Engine(model, drafters.Oracle(want.tokens)).generate_ddtree(prompt, NUM_TOKENS)
    assert got.tokens[-1] == eos and eos not in got.tokens[:-1] and got.finish_reason == "eos"


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 8, 9])
def test_max_new_tokens_reached_in_mid_path(tiny2, prompt, want, num_tokens):
    """max_new_tokens reached in mid-path: exactly so many tokens, and logits of no others."""
    got = decode(tiny2, drafters.Oracle(want.tokens), prompt, 64, num_tokens)
    assert got.tokens == want.tokens[:num_tokens] and got.finish_reason == "length"
    assert torch.equal(got.logits, want.logits[:num_tokens])


@pytest.fixture
def poisonous_unseen(unseen, device):
    """tiny2 whose embedding of the unseen token is NaN."""
    return poisoned_model(unseen, device)


def test_nan_logits_of_the_target(poisonous_unseen, prompt, want, unseen):
    """NaN logits of the target: an error that names stream and position; the engine goes on working."""
    engine = Engine(poisonous_unseen, drafters.Oracle([want.tokens] * 2))
    bad = [*prompt[:-1], unseen]
    for generate in (engine.generate_ar, engine.generate_ddtree):
        with pytest.raises(NonFiniteError, match=f"stream 1: .* position {len(bad) - 1} "):
            generate([prompt, bad], NUM_TOKENS)
    assert engine.generate_ddtree(prompt, NUM_TOKENS).tokens == want.tokens


def test_nan_logits_beyond_what_is_emitted(poisonous_unseen, prompt, want, script, unseen):
    """NaN logits of the target: a rejected node's do no harm, since AR would not have computed them."""

    def answer(context):
        done = len(context.tokens[0]) - len(prompt)
        right = want.tokens[done : done + 2]
        return candidates([[[-2.0, -3.0]] * len(right)], [[[unseen, t] for t in right]])

    got = decode(poisonous_unseen, script(answer), prompt)
    assert_same(got, want)
    assert sum(got.stats.accepted_per_step) > 0


def test_poisoned_cache(tiny2, prompts, ar, shuffled_oracle, monkeypatch):
    """unused slots are poisoned: a cache full of NaN gives the same bits."""
    new_cache = tiny2.new_cache

    def poisoned(num_streams, num_slots):
        cache = new_cache(num_streams, num_slots)
        cache.data.fill_(torch.nan)
        return cache

    monkeypatch.setattr(tiny2, "new_cache", poisoned)
    expected = ar("tiny2")
    for got, w in zip(
        decode(tiny2, shuffled_oracle([g.tokens for g in expected]), prompts["tiny2"]), expected, strict=True
    ):
        assert_same(got, w)
