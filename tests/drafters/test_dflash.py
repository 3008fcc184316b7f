"""DFlash: its arithmetic against a plain oracle, and what it is not made for."""

from __future__ import annotations

import math

import pytest
import torch

from kdtree_nb import Engine
from kdtree_nb.config import Yarn
from kdtree_nb.drafters import DFlash
from kdtree_nb.drafters.dflash.weights import random_weights
from kdtree_nb.speculate.text_logits import text_logits
from tests.drafters.dflash_models import KINDS, TEXT, config_for, noisy_weights


def oracle(config, weights, embedding, head, hidden, tokens, anchor):
    """Logits [b - 1, V] behind tokens[anchor] in float64: one block, token by token and head by head."""
    w = {name: value.double() for name, value in weights.items()}
    d, eps = config.head_dim, config.rms_norm_eps

    def norm(x, weight):
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight

    def rotate(x, position):
        angle = position * config.rope_theta ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
        a, b = x[: d // 2], x[d // 2 :]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])

    context = norm(hidden[:anchor].double() @ w["fc.weight"].T, w["hidden_norm.weight"])
    b = config.block_size
    x = embedding[[tokens[anchor]] + [config.mask_token_id] * (b - 1)].double()
    for layer in range(config.num_hidden_layers):
        p = {name.removeprefix(f"layers.{layer}."): v for name, v in w.items() if name.startswith(f"layers.{layer}.")}
        rows = norm(x, p["input_layernorm.weight"])
        seen, mixed = torch.cat([context, rows]), torch.zeros(b, config.num_attention_heads, d, dtype=torch.float64)
        for h in range(config.num_attention_heads):
            kv = h // config.num_groups
            part = slice(kv * d, (kv + 1) * d)
            key = norm(seen @ p["self_attn.k_proj.weight"][part].T, p["self_attn.k_norm.weight"])
            key = torch.stack([rotate(k, position) for position, k in enumerate(key)])
            value = seen @ p["self_attn.v_proj.weight"][part].T
            query = norm(rows @ p["self_attn.q_proj.weight"][h * d : (h + 1) * d].T, p["self_attn.q_norm.weight"])
            for i in range(b):
                score = key @ rotate(query[i], anchor + i) / math.sqrt(d)
                for j in range(len(seen)):
                    far = config.windows[layer] is not None and abs(anchor + i - j) >= config.windows[layer]
                    if far or (config.causal[layer] and j > anchor + i):
                        score[j] = -torch.inf
                mixed[i, h] = score.softmax(0) @ value
        x = x + mixed.flatten(1) @ p["self_attn.o_proj.weight"].T
        rows = norm(x, p["post_attention_layernorm.weight"])
        gate, up = rows @ p["mlp.gate_proj.weight"].T, rows @ p["mlp.up_proj.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ p["mlp.down_proj.weight"].T
    return norm(x[1:], w["norm.weight"]) @ head.double().T


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block_size", [6, 2])
def test_logits_are_those_of_the_oracle(target, kind, block_size):
    model, embedding, head, hidden = target
    config = config_for(**KINDS[kind])
    weights = noisy_weights(config)
    anchors = [0, 1, 11, 30, len(TEXT) - 1]
    got = text_logits(DFlash(config, weights, block_size), model, TEXT, anchors).cpu()
    small = config_for(**KINDS[kind], block_size=block_size)
    want = torch.stack([oracle(small, weights, embedding, head, hidden, TEXT, anchor) for anchor in anchors])
    assert got.shape == (5, block_size - 1, 331)
    assert (got - want).abs().max() < 2e-4 * want.abs().max()


def test_a_drafted_part_of_a_block(target):
    model, config = target[0], config_for()
    weights = noisy_weights(config)
    whole = text_logits(DFlash(config, weights), model, TEXT, [4, 9])
    part = text_logits(DFlash(config, weights, depth=2), model, TEXT, [4, 9])
    assert torch.equal(part, whole[:, :2])
    assert not torch.allclose(text_logits(DFlash(config, weights, block_size=3), model, TEXT, [4, 9]), part)


def test_what_lies_behind_the_block_does_not_matter(target):
    model, config = target[0], config_for()
    drafter = DFlash(config, noisy_weights(config))
    want = text_logits(drafter, model, TEXT, [12])
    assert torch.allclose(text_logits(drafter, model, TEXT[:13], [12]), want, atol=1e-5)
    changed = TEXT[:13] + [(token + 1) % 331 for token in TEXT[13:]]
    assert torch.allclose(text_logits(drafter, model, changed, [12]), want, atol=1e-5)


def test_places_outside_the_text(target):
    drafter = DFlash.random(config_for())
    for anchors in ([], [-1], [len(TEXT)]):
        with pytest.raises(ValueError, match="text_logits: expected positions of 0 … 44"):
            text_logits(drafter, target[0], TEXT, anchors)


def test_yarn_changes_the_angles(target):
    model, config = target[0], config_for(rope_scaling=Yarn(8.0, 64, mscale=1.0, mscale_all_dim=1.0))
    weights = noisy_weights(config)
    plain = text_logits(DFlash(config_for(), weights), model, TEXT, [40])
    assert not torch.allclose(text_logits(DFlash(config, weights), model, TEXT, [40]), plain, atol=1e-3)
    louder = config_for(rope_scaling=Yarn(8.0, 64, mscale=1.0, mscale_all_dim=1.0, attention_factor=1.2))
    assert not torch.allclose(
        text_logits(DFlash(louder, weights), model, TEXT, [40]),
        text_logits(DFlash(config, weights), model, TEXT, [40]), atol=1e-3,
    )  # fmt: skip


def test_targets_of_other_sizes(target):
    model = target[0]
    for changes, message in (
        ({"hidden_size": 256}, "hidden_size: expected a target with 256, as its config says, got 192"),
        ({"vocab_size": 332}, "vocab_size: expected a target with 332, as its config says, got 331"),
        ({"target_layer_ids": (0, 5)}, "target_layer_ids: expected layers 0 … 4 of the target"),
    ):
        with pytest.raises(ValueError, match=f"DFlash: {message}"):
            Engine(model, DFlash.random(config_for(**changes))).generate_ddtree(TEXT[:5], 4)


@pytest.mark.parametrize("options", [{"block_size": 7}, {"block_size": 1}, {"depth": 0}, {"depth": 6}, {"depth": True},
                                     {"block_size": 4, "depth": 4}])  # fmt: skip
def test_sizes_that_a_drafter_does_not_have(options):
    with pytest.raises(ValueError, match="DFlash: .*: expected an integer of"):
        DFlash(config_for(), random_weights(config_for()), **options)
