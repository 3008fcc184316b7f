"""Every family against `transformers`: logits, greedy tokens, and DDTree equal to AR in every dtype."""

from __future__ import annotations

import families
import pytest
import torch

from kdtree_nb import Engine, load_model
from kdtree_nb.drafters import AlwaysWrong, NGram, Oracle

ALL = [*families.FAMILIES, families.WRAPPED]
SEEDS = (0, 1)
RELATIVE_TOLERANCE = 1e-5
"""Of the largest logit: FP32 rounding through three layers of random weights."""


def text(length: int, seed: int) -> list[int]:
    return torch.randint(0, 331, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def routing(model, tokens) -> torch.Tensor:
    """How many rows chose each expert of the last layer, by `transformers`."""
    chosen = []
    gate = model.model.layers[-1].mlp.gate
    handle = gate.register_forward_hook(lambda module, args, out: chosen.append(out[2]))
    families.reference_logits(model, tokens)
    handle.remove()
    return torch.bincount(chosen[0].flatten(), minlength=gate.weight.shape[0])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("family", ALL)
def test_logits_and_greedy_tokens_are_those_of_transformers(family, seed, checkpoint, chain_logits, device):
    reference, folder = checkpoint(family, seed)
    model = load_model(folder, device, report=lambda message: None)
    for length in (1, 17, 300):
        tokens = text(length, seed + length)
        want, got = families.reference_logits(reference, tokens), chain_logits(model, tokens)
        largest = want.abs().max().item()
        assert largest >= 5
        assert torch.allclose(got, want, rtol=0, atol=RELATIVE_TOLERANCE * largest)
    counts = routing(reference, tokens)
    assert counts.max() > 1.5 * counts.float().mean(), "the routing should be far from uniform"
    prompt = tokens[:120]
    engine = Engine(model)
    assert engine.generate_ar(prompt, 64, stop_token_ids=[]).tokens == families.greedy(reference, prompt, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ALL)
def test_ddtree_is_ar_to_the_bit(family, dtype, checkpoint, device):
    _, folder = checkpoint(family)
    model = load_model(folder, device, dtype, report=lambda message: None)
    prompt = text(60, 3) + text(20, 4) * 2
    ar = Engine(model).generate_ar(prompt, 48, stop_token_ids=[], return_logits=True)
    for drafter in (Oracle([prompt + ar.tokens]), AlwaysWrong([prompt + ar.tokens]), NGram()):
        engine = Engine(model, drafter=drafter, budget=33)
        tree = engine.generate_ddtree(prompt, 48, stop_token_ids=[], return_logits=True)
        assert tree.tokens == ar.tokens
        assert torch.equal(tree.logits, ar.logits)


def test_the_wrapper_names_what_it_leaves_aside_once(checkpoint):
    said = []
    load_model(checkpoint(families.WRAPPED)[1], report=said.append)
    assert len(said) == 1
    assert "2 tensors" in said[0] and "mm_projector.*, vision_tower.*" in said[0]
