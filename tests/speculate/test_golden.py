"""The engine in FP32 against the goldens, which the numpy reference computed in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kdtree_nb import Engine, drafters
from kdtree_nb.goldens import NUM_LOGITS_TOKENS, fp32_tolerance, load_goldens


@pytest.fixture(params=["tiny", "tiny2"])
def goldens(request):
    return request.param, load_goldens(request.param)


def test_ar_gives_the_golden_tokens_and_logits(goldens, models):
    name, prompts = goldens
    with_logits = [g for g in prompts if g.logits is not None]
    assert with_logits
    for golden in with_logits:
        got = Engine(models(name)).generate_ar(golden.prompt, NUM_LOGITS_TOKENS, return_logits=True, stop_token_ids=())
        assert got.tokens == golden.tokens[:NUM_LOGITS_TOKENS]
        error = np.abs(got.logits.cpu().numpy().astype(np.float64) - golden.logits).max()
        assert error <= fp32_tolerance(golden.logits)


def test_ar_gives_all_golden_tokens_in_one_batch(goldens, models):
    name, prompts = goldens
    counts = [len(g.tokens) for g in prompts]
    assert len(prompts) >= 4 and min(counts) >= 128
    got = Engine(models(name)).generate_ar([g.prompt for g in prompts], counts, stop_token_ids=())
    assert [g.tokens for g in got] == [g.tokens for g in prompts]


@pytest.mark.parametrize("drafter", ["ngram", "oracle", "random"])
def test_ddtree_gives_all_golden_tokens(goldens, models, drafter):
    name, prompts = goldens
    made = {
        "ngram": lambda: drafters.NGram(),
        "oracle": lambda: drafters.Oracle([g.tokens for g in prompts]),
        "random": lambda: drafters.Random(depth=3),
    }[drafter]()
    got = Engine(models(name), made, budget=8).generate_ddtree(
        [g.prompt for g in prompts], [len(g.tokens) for g in prompts], stop_token_ids=()
    )
    assert [g.tokens for g in got] == [g.tokens for g in prompts]
    if drafter == "oracle":
        assert all(g.stats.tokens_per_step == 8.0 for g in got)


def test_the_golden_texts_are_not_monotonous(goldens):
    _, prompts = goldens
    assert all(len(set(g.tokens)) >= 8 for g in prompts)


@pytest.mark.parametrize("budget", [0, 1, 16, 64])
def test_bf16_is_exact_against_itself_over_long_texts(goldens, models, budget):
    """BF16 need not follow the goldens, but DDTree must follow AR, bit by bit."""
    name, prompts = goldens
    model, texts = models(name, torch.bfloat16), [g.prompt for g in prompts[:3]]
    want = Engine(model).generate_ar(texts, 96, return_logits=True, stop_token_ids=())
    got = Engine(model, drafters.NGram(), budget).generate_ddtree(texts, 96, return_logits=True, stop_token_ids=())
    for g, w in zip(got, want, strict=True):
        assert g.tokens == w.tokens and torch.equal(g.logits, w.logits)
