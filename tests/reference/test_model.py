"""ReferenceModel: forms, batches and precisions agree; a whole DDTree loop in numpy gives the greedy tokens."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kdtree_nb.errors import CheckpointError
from kdtree_nb.reference import (
    ReferenceModel,
    argmax,
    cache_compact,
    draft_topk,
    round_bf16,
    tree_accept,
    tree_build,
    tree_rows,
)
from kdtree_nb.tiny2 import tiny2_config, tiny2_weights

PROMPTS = [[5], [9, 0, 330], [int(t) for t in np.random.default_rng(0).integers(0, 331, 40)]]


@pytest.fixture(scope="module")
def model():
    return ReferenceModel(tiny2_config(), tiny2_weights())


@pytest.fixture(scope="module")
def greedy(model):
    return model.generate_batch(PROMPTS, 32)


def test_forms_agree(model, greedy):
    for prompt, (tokens, logits) in zip(PROMPTS, greedy, strict=True):
        text = prompt + tokens[:-1]
        naive, absorbed = model.logits(text, "naive"), model.logits(text)
        assert np.abs(naive - absorbed).max() <= 1e-12
        assert np.abs(naive[len(prompt) - 1 :] - logits).max() <= 1e-12  # cached decoding, batched
        assert argmax(naive)[len(prompt) - 1 :].tolist() == tokens
        assert len(set(tokens)) >= 8


def test_one_prompt_alone(model, greedy):
    tokens, logits = model.generate(PROMPTS[1], 32)
    assert tokens == greedy[1][0] and logits.shape == (32, 331)
    assert np.abs(logits - greedy[1][1]).max() <= 1e-12


def test_float32_stays_within_the_tolerance(greedy):
    model = ReferenceModel(tiny2_config(), tiny2_weights(), "float32")
    for (tokens, logits), (want, golden) in zip(model.generate_batch(PROMPTS, 32), greedy, strict=True):
        assert logits.dtype == np.float32 and tokens == want
        assert 0 < np.abs(logits - golden).max() <= 8e-6 * max(1, np.abs(golden).max())


def test_bf16_follows_and_its_cache_holds_bf16_values(model, greedy):
    rounded = ReferenceModel(tiny2_config(), tiny2_weights(), "bf16")
    text = PROMPTS[2] + greedy[2][0]
    state = rounded.prefill([text], len(text))
    cache = state.cache[:, :, : len(text) - 1]
    assert (cache == round_bf16(cache)).all()
    error = np.abs(rounded.logits(text) - model.logits(text)).max(axis=-1)
    assert 1e-3 < np.median(error) <= 0.05 * np.abs(greedy[2][1]).max()  # a few rows are routed to other experts
    with pytest.raises(ValueError, match="naive form: expected float64 or float32, got bf16"):
        rounded.logits(text, "naive")


def noisy_draft(greedy_tokens, committed, prompt_len, depth, rng):
    """Logits [L, V] that favour the greedy continuation, except at a random quarter of the depths."""
    logits = rng.normal(size=(depth, 331))
    ahead = greedy_tokens[committed - prompt_len :][:depth]
    logits[np.arange(len(ahead)), ahead] += rng.choice([7, 0], len(ahead), p=[0.75, 0.25])
    return logits


@pytest.mark.parametrize("budget", [0, 1, 7, 33])
def test_ddtree_of_reference_operations_is_greedy(model, greedy, budget):
    """draft -> build -> verify -> accept -> compact, on three streams of different lengths."""
    rng, depth, num_tokens = np.random.default_rng(budget), 5, 32
    texts = [list(prompt) for prompt in PROMPTS]
    state = model.prefill(PROMPTS, 40 + num_tokens + depth + 1 + budget)
    accepted_counts = []
    while min(len(t) - len(p) for t, p in zip(texts, PROMPTS, strict=True)) < num_tokens:
        drafts = [
            noisy_draft(tokens, len(text), len(prompt), depth, rng)
            for (tokens, _), text, prompt in zip(greedy, texts, PROMPTS, strict=True)
        ]
        tree = tree_build(*draft_topk(np.stack(drafts), 40), [text[-1] for text in texts], budget)
        rows = tree_rows(tree, state.prefix_len)
        target = np.full(tree.token.shape, -1)
        target[rows.stream, rows.node] = argmax(model.forward(rows, tree, state.cache, state.prefix_len))
        path, num_accepted, next_token = tree_accept(tree, target, depth)
        cache_compact(state.cache, state.prefix_len, path, num_accepted)
        state.prefix_len += 1 + num_accepted
        for s, text in enumerate(texts):
            text += [*tree.token[s, path[s, : num_accepted[s]]].tolist(), int(next_token[s])]
        accepted_counts += num_accepted.tolist()
    for (tokens, _), text, prompt in zip(greedy, texts, PROMPTS, strict=True):
        assert text[len(prompt) :][:num_tokens] == tokens
    assert set(accepted_counts) == {0} if budget == 0 else {0, 1} <= set(accepted_counts)
    assert budget < 7 or max(accepted_counts) >= 3


def test_end_of_text_is_the_last_token(greedy):
    tokens = greedy[2][0]
    end = next(i for i in range(5, 32) if tokens.index(tokens[i]) == i)
    config = dataclasses.replace(tiny2_config(), eos_token_ids=(tokens[end],))
    model = ReferenceModel(config, tiny2_weights())
    stopped, logits = model.generate(PROMPTS[2], 32)
    assert stopped == tokens[: end + 1] and logits.shape == (end + 1, 331)
    assert np.abs(logits - greedy[2][1][: end + 1]).max() <= 1e-12
    assert model.generate(PROMPTS[2], 32, stop_token_ids=())[0] == tokens
    assert model.generate(PROMPTS[2], 32, stop_token_ids=tokens[:1])[0] == tokens[:1]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "prefill: expected one or more prompts"),
        ([[1], []], "prefill: expected one or more prompts of at least one token"),
        ([[1, 331, 2]], "embed: expected token ids in 0 … 330, got 331"),
        ([[1, -1, 2]], "embed: expected token ids in 0 … 330, got -1"),
        ([[1], [1] * 2048], "generate: expected at most 2048 input positions, got 2049"),
    ],
)
def test_bad_prompts(model, prompts, message):
    with pytest.raises(ValueError, match=message):
        model.generate_batch(prompts, 2)


def test_cache_too_small(model):
    with pytest.raises(ValueError, match="cache_append: expected slot in 0 … 1, got 2"):
        model.prefill([[1, 2, 3, 4]], 2)


def test_unknown_form(model):
    with pytest.raises(ValueError, match="logits: expected form 'absorbed' or 'naive', got 'dense'"):
        model.logits([1, 2], "dense")


def test_tensors_missing_and_left_over():
    weights = tiny2_weights()
    with pytest.raises(CheckpointError, match="got .*'extra.weight'"):
        ReferenceModel(tiny2_config(), weights | {"extra.weight": np.zeros(1)})
    del weights["model.layers.3.mlp.experts.5.up_proj.weight"]
    with pytest.raises(CheckpointError, match="expected a tensor model.layers.3.mlp.experts.5.up_proj.weight"):
        ReferenceModel(tiny2_config(), weights)
