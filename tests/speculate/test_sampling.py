"""Sampling: DDTree draws the tokens of AR with the same bits of logits; what a text depends on, and what not."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kdtree_nb import Engine, Sampling, drafters, load_model, ops, reference
from kdtree_nb.errors import NonFiniteError
from kdtree_nb.speculate import engine as engine_module
from kdtree_nb.speculate.sampling import GREEDY, Chooser, check_samplings
from tests.speculate.shared import assert_same

SAMPLINGS = [Sampling(1.0, seed=3), Sampling(0.8, top_k=20, top_p=0.9, seed=2**40), Sampling(1.3, top_p=0.95, seed=5)]
"""One for each of the 3 prompts."""

BUDGETS = [0, 1, 7, 31, 64, 200]
DRAFTERS = {
    "oracle": lambda continuations: drafters.Oracle(continuations),
    "always wrong": lambda continuations: drafters.AlwaysWrong(continuations),
    "random": lambda continuations: drafters.Random(seed=4),
    "ngram": lambda continuations: drafters.NGram(),
}
PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]


@pytest.fixture(scope="session")
def sampled(models, prompts):
    """(model name, dtype) -> AR generations of the 3 prompts by SAMPLINGS, each alone, 24 tokens with logits.

    The host leads their steps.
    """
    results = {}

    def get(name, dtype):
        if (name, dtype) not in results:
            engine = Engine(models(name, dtype))
            engine._kind = engine_module.HOST
            results[name, dtype] = [
                engine.generate_ar(prompt, 24, return_logits=True, stop_token_ids=(), sampling=sampling)
                for prompt, sampling in zip(prompts[name], SAMPLINGS, strict=True)
            ]
        return results[name, dtype]

    return get


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("model_name", ["tiny", "tiny2"])
def test_ddtree_draws_the_tokens_of_ar(model_name, name, budget, dtype, sampled, prompts, models):
    expected = sampled(model_name, dtype)
    drafter = DRAFTERS[name]([g.tokens for g in expected])
    engine = Engine(models(model_name, dtype), drafter, budget)
    options = {"return_logits": True, "stop_token_ids": ()}
    together = engine.generate_ddtree(prompts[model_name], 24, sampling=SAMPLINGS, **options)
    for got, want in zip(together, expected, strict=True):
        assert_same(got, want)
    if name == "oracle" and budget >= drafter.depth:
        assert together[0].stats.num_target_forwards == 3
    if name == "always wrong":
        assert together[0].stats.accepted_per_step == [0] * 24
    alone = Engine(models(model_name, dtype), DRAFTERS[name]([expected[1].tokens]), budget).generate_ddtree(
        prompts[model_name][1], 24, sampling=SAMPLINGS[1], **options
    )
    assert_same(alone, expected[1])


@pytest.mark.parametrize("budget", [3, 16, 64])
def test_accepted_nodes_scattered_over_the_tree(budget, sampled, prompts, models, shuffled_oracle):
    expected, paths = sampled("tiny2", torch.float32), []
    engine = Engine(models("tiny2"), shuffled_oracle([g.tokens for g in expected]), budget)
    got = engine.generate_ddtree(
        prompts["tiny2"], 24, return_logits=True, stop_token_ids=(), sampling=SAMPLINGS,
        on_step=lambda record: paths.extend(record.accepted_path),
    )  # fmt: skip
    for g, want in zip(got, expected, strict=True):
        assert_same(g, want)
    assert any(path and path != list(range(1, len(path) + 1)) for path in paths)


def test_ar_is_the_same_in_a_batch_and_beside_greedy_streams(models, sampled, ar, prompts):
    expected, greedy = sampled("tiny2", torch.float32), ar("tiny2")
    mixed = [SAMPLINGS[0], None, SAMPLINGS[2], GREEDY]
    batch = [prompts["tiny2"][i] for i in (0, 1, 2, 0)]
    got = Engine(models("tiny2")).generate_ar(batch, 24, return_logits=True, stop_token_ids=(), sampling=mixed)
    for g, want in zip(got, (expected[0], greedy[1], expected[2], greedy[0]), strict=True):
        assert_same(g, want)


def test_texts_are_worth_comparing(sampled, ar):
    for name in ("tiny", "tiny2"):
        expected = sampled(name, torch.float32)
        assert all(g.tokens != greedy.tokens for g, greedy in zip(expected, ar(name), strict=True))
        assert len({t for g in expected for t in g.tokens}) >= 8


def test_tokens_are_the_oracles_draws_from_the_logits(sampled, prompts):
    """Token i of a text is chosen after row len(prompt) - 1 + i, with the parameters of its own stream."""
    expected = sampled("tiny2", torch.float32)
    for generation, prompt, s in zip(expected, prompts["tiny2"], SAMPLINGS, strict=True):
        logits = generation.logits.double().cpu().numpy()
        position = len(prompt) - 1 + np.arange(24)
        parameters = (np.float32([s.temperature]), [s.top_k], np.float32([s.top_p]), [s.seed])
        assert reference.sample(logits, [0] * 24, position, *parameters).tolist() == generation.tokens


def test_a_text_goes_on_where_it_was_cut(models):
    """The noise is that of the position in the text, wherever the prompt ends."""
    engine, sampling = Engine(models("tiny2")), Sampling(1.2, seed=9)
    whole = engine.generate_ar(PROMPT, 20, sampling=sampling, stop_token_ids=()).tokens
    rest = engine.generate_ar(PROMPT + whole[:7], 13, sampling=sampling, stop_token_ids=()).tokens
    assert whole[:7] + rest == whole


def test_seeds_make_texts_and_calls_do_not(models):
    model = models("tiny2")
    engine = Engine(model, drafters.NGram(), 8)
    seeds = [Sampling(seed=seed) for seed in (1, 2, 3, 2**62)]
    texts = [engine.generate_ddtree(PROMPT, 16, sampling=s, stop_token_ids=()).tokens for s in seeds]
    assert len({tuple(text) for text in texts}) == 4
    again = engine.generate_ddtree([PROMPT] * 4, 16, sampling=seeds, stop_token_ids=())
    assert [g.tokens for g in again] == texts
    assert Engine(model).generate_ar(PROMPT, 16, sampling=seeds[2], stop_token_ids=()).tokens == texts[2]


def test_captured_forwards_take_the_parameters_of_each_call(models):
    engine, texts = Engine(models("tiny2")), {}
    samplings = [None, Sampling(1.0, seed=1), Sampling(1.0, seed=2), Sampling(0.5, 30, 0.8, 2)]
    for sampling in samplings + samplings[::-1]:
        text = engine.generate_ar(PROMPT, 16, sampling=sampling, stop_token_ids=()).tokens
        fresh = Engine(models("tiny2")).generate_ar(PROMPT, 16, sampling=sampling, stop_token_ids=()).tokens
        assert text == texts.setdefault(sampling, fresh) == fresh
    assert len({tuple(text) for text in texts.values()}) == 4


@pytest.mark.parametrize(
    "sampling",
    [Sampling(0), Sampling(0.0, 5, 0.5, 3), Sampling(1.0, top_k=1), Sampling(1.0, top_p=1e-6), Sampling(1e-5, seed=4)],
)
def test_what_is_greedy(models, ar, prompts, sampling):
    got = Engine(models("tiny2"), drafters.NGram(), 8).generate_ddtree(
        prompts["tiny2"], 24, return_logits=True, stop_token_ids=(), sampling=sampling
    )
    for g, want in zip(got, ar("tiny2"), strict=True):
        assert_same(g, want)


def test_first_tokens_follow_the_softmax_of_the_logits(models):
    engine, num_streams = Engine(models("tiny2")), 4000
    (probe,) = engine.generate_ar([PROMPT], 1, return_logits=True)
    probabilities = (probe.logits[0].double() / 0.7).softmax(0).cpu().numpy()
    chooser = Chooser(num_streams, engine.model)
    chooser.set([Sampling(0.7, seed=seed) for seed in range(num_streams)])
    stream = torch.arange(num_streams, dtype=torch.int32, device=engine.model.device)
    rows = ops.Rows(stream, None, torch.full_like(stream, len(PROMPT) - 1), None, None)
    tokens = chooser(probe.logits.expand(num_streams, -1).contiguous(), rows).cpu().numpy()
    for seed in (0, 1, 77):
        alone = engine.generate_ar(PROMPT, 1, sampling=Sampling(0.7, seed=seed), stop_token_ids=()).tokens
        assert alone == [tokens[seed]]
    likely = np.argsort(-probabilities)[:12]
    counts = np.append([np.count_nonzero(tokens == v) for v in likely], np.count_nonzero(~np.isin(tokens, likely)))
    expected = num_streams * np.append(probabilities[likely], 1 - probabilities[likely].sum())
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert statistic < 12 + 5 * math.sqrt(2 * 12)  # 12 degrees of freedom: five sigma


def test_stop_tokens_and_lengths_are_those_of_ar(models):
    model, sampling = models("tiny2"), Sampling(1.1, seed=12)
    tokens = Engine(model).generate_ar(PROMPT, 30, sampling=sampling, stop_token_ids=()).tokens
    stop = tokens[12]
    oracle = drafters.Oracle([tokens])
    got = Engine(model, oracle, 16).generate_ddtree(PROMPT, 30, sampling=sampling, stop_token_ids=[stop])
    assert got.tokens == tokens[: tokens.index(stop) + 1] and got.finish_reason == "eos"
    short = Engine(model, oracle, 16, max_seq_len=20).generate_ddtree(PROMPT, 30, sampling=sampling, stop_token_ids=())
    assert short.tokens == tokens[:12] and short.finish_reason == "max_seq_len"


def test_nan_logits_are_an_error(device):
    model = load_model("tiny2", device)
    model.embedding[7] = float("nan")
    with pytest.raises(NonFiniteError, match="stream 0: the target's logits at position 7 hold a NaN"):
        Engine(model).generate_ar(PROMPT, 4, sampling=Sampling())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"temperature": -0.1},
            "temperature: expected 0 .greedy. or a finite FP32 number of at least 2.-126, got -0.1",
        ),
        ({"temperature": float("nan")}, "temperature: expected .* got nan"),
        ({"temperature": float("inf")}, "temperature: expected .* got inf"),
        ({"temperature": 1e39}, "temperature: expected .* got 1e.39"),
        ({"temperature": 10**400}, "temperature: expected .* got 1000"),
        ({"top_p": -(10**400)}, "top_p: expected .* got -1000"),
        ({"temperature": 1e-39}, "temperature: expected .* got 1e-39"),
        ({"temperature": 1e-60}, "temperature: expected .* got 1e-60"),
        ({"temperature": "1"}, "temperature: expected .* got '1'"),
        ({"temperature": True}, "temperature: expected .* got True"),
        ({"top_k": -1}, "top_k: expected an integer of 0 .all. … 1024, got -1"),
        ({"top_k": 1025}, "top_k: expected .* got 1025"),
        ({"top_k": 5.0}, "top_k: expected .* got 5.0"),
        ({"top_p": 0}, "top_p: expected a number above 0 and at most 1, got 0"),
        ({"top_p": 1.0000001}, "top_p: expected .* got 1.0000001"),
        ({"top_p": 1e-50}, "top_p: expected .* got 1e-50"),
        ({"top_p": None}, "top_p: expected .* got None"),
        ({"seed": -1}, r"seed: expected an integer of 0 … 2\^63 - 1, got -1"),
        ({"seed": 2**63}, "seed: expected .* got 9223372036854775808"),
        ({"seed": 1.0}, "seed: expected .* got 1.0"),
    ],
)
def test_bad_parameters_are_named(arguments, message):
    with pytest.raises(ValueError, match=f"Sampling: {message}"):
        Sampling(**arguments)


def test_numbers_of_numpy():
    got = Sampling(np.float32(0.5), np.int64(7), np.float64(0.9), np.int32(3))
    assert got == Sampling(0.5, 7, 0.9, 3)
    with pytest.raises(AttributeError):
        got.seed = 4


@pytest.mark.parametrize("sampling", [0.7, "greedy", [0.7, 0.8], [Sampling()], [Sampling()] * 3, []])
def test_one_sampling_or_one_per_stream(models, sampling):
    with pytest.raises(ValueError, match="sampling: expected"):
        Engine(models("tiny2")).generate_ar([PROMPT, PROMPT], 3, sampling=sampling)


def test_none_is_greedy():
    assert check_samplings(None, 2) == [GREEDY, GREEDY]
    assert check_samplings((None, Sampling(seed=4)), 2) == [GREEDY, Sampling(seed=4)]
