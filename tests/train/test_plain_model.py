"""The PyTorch model of K2's structure: equal to the reference, routed as it is, decoded with a cache as without."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from kdtree_nb.config import Yarn
from kdtree_nb.reference import ReferenceModel
from kdtree_nb.train.nano.decode import greedy_batch
from kdtree_nb.train.plain_model import PlainModel, export_tensors, import_tensors
from tests.train.shared import random_model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("renormalise", [True, False])
def test_logits_are_those_of_the_reference(toy_config, tied, renormalise):
    config = dataclasses.replace(toy_config, tie_word_embeddings=tied, norm_topk_prob=renormalise)
    model = random_model(config)
    tokens = np.random.default_rng(3).integers(0, config.vocab_size, 40)
    with torch.no_grad():
        logits = model.double()(torch.from_numpy(tokens)[None], torch.float64)[0][0].numpy()
    want = ReferenceModel(config, export_tensors(model)).logits(tokens.tolist())
    assert np.abs(logits - want).max() <= 1e-6 * np.abs(want).max()


def test_the_bias_chooses_but_does_not_weigh(toy_config):
    model = random_model(toy_config)
    router = model.layers[1].mlp.gate
    x = torch.randn(1, 50, toy_config.hidden_size)
    router.e_score_correction_bias.zero_()
    router.e_score_correction_bias[3] = 100.0
    _, gates = router.route(x)
    assert (gates[..., 3] > 0).all()
    assert ((gates > 0).sum(-1) == toy_config.num_experts_per_tok).all()
    torch.testing.assert_close(gates.sum(-1), torch.full((1, 50), toy_config.routed_scaling_factor))
    assert gates[..., 3].max() < toy_config.routed_scaling_factor  # 100 does not weigh, a sigmoid does


def test_features_are_the_residual_stream_behind_their_layers(toy_config):
    model = random_model(toy_config)
    tokens = torch.arange(20)[None]
    hidden = model.hidden(tokens, features=(2, 0))
    last, first = hidden.features.split(toy_config.hidden_size, -1)
    torch.testing.assert_close(model.norm(last), hidden.last)
    shorter = PlainModel(dataclasses.replace(toy_config, num_hidden_layers=1))
    shorter.load_state_dict({n: t for n, t in model.state_dict().items() if not n.startswith(("layers.1", "layers.2"))})
    torch.testing.assert_close(shorter.hidden(tokens).last, model.norm(first))
    assert model.hidden(tokens).features is None


@pytest.mark.parametrize("tied", [True, False])
def test_export_and_import_are_inverse(toy_config, tied):
    config = dataclasses.replace(toy_config, tie_word_embeddings=tied)
    model, other = random_model(config, 0), random_model(config, 1)
    tensors = export_tensors(model)
    assert ("lm_head.weight" in tensors) is not tied
    assert tensors["model.layers.1.mlp.gate.e_score_correction_bias"].shape == (config.n_routed_experts,)
    import_tensors(other, tensors)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


def test_cached_decoding_gives_the_tokens_of_recomputing(toy_config, monkeypatch):
    monkeypatch.setattr("kdtree_nb.train.nano.decode.MAX_PREFILL_TOKENS", 20)  # two texts a time
    model = random_model(toy_config)
    prompt = torch.randint(0, toy_config.vocab_size, (5, 9), generator=torch.Generator().manual_seed(1))
    found = greedy_batch(model.double(), prompt, 24, torch.float64)
    assert found.shape == (5, 33) and torch.equal(found[:, :9], prompt)
    for text, row in zip(prompt.tolist(), found.tolist(), strict=True):
        assert model.greedy(text, 24, torch.float64) == row[9:]
    assert len(set(found[:, 9:].flatten().tolist())) > 8


def test_what_it_does_not_compute_is_refused(toy_config):
    with pytest.raises(ValueError, match="expected plain rotary frequencies, got YaRN"):
        PlainModel(dataclasses.replace(toy_config, rope_scaling=Yarn(4.0, 64)))
    with pytest.raises(ValueError, match="expected one group and a shared expert, got 2 and 2"):
        PlainModel(dataclasses.replace(toy_config, n_group=2, topk_group=1))
