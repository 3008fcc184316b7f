"""Feed-forward blocks: reading their tensors, dense and MoE."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from kdtree_nb.reference import Dense, Moe, Precision, Weights, exact, feed_forward, feed_forward_weights
from kdtree_nb.tiny2 import tiny2_config, tiny2_weights

CONFIG = tiny2_config()


@pytest.fixture(scope="module")
def source():
    return Weights(tiny2_weights(), Precision.named("float64"))


def gated(source, prefix, x):
    """down (silu(gate x) · up x) by torch, straight from the checkpoint's tensors."""
    gate, up, down = (
        torch.from_numpy(source.tensors[f"{prefix}.{name}_proj.weight"]).double() for name in ("gate", "up", "down")
    )
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def test_dense(source):
    weights = feed_forward_weights(source.at("model.layers.1.mlp."), CONFIG, 1)
    assert isinstance(weights, Dense)
    x, residual = np.random.default_rng(0).normal(size=(2, 5, CONFIG.hidden_size))
    want = gated(source, "model.layers.1.mlp", torch.from_numpy(x)).numpy() + residual
    assert np.abs(feed_forward(x, weights, CONFIG, residual, exact) - want).max() <= 1e-12


@pytest.mark.parametrize("renormalize", [False, True])
def test_moe(source, renormalize):
    config = dataclasses.replace(CONFIG, norm_topk_prob=renormalize)
    layer = "model.layers.4.mlp"
    weights = feed_forward_weights(source.at(f"{layer}."), config, 4)
    assert isinstance(weights, Moe)
    x, residual = np.random.default_rng(1).normal(size=(2, 9, CONFIG.hidden_size))
    tx = torch.from_numpy(x)
    score = torch.softmax(tx @ torch.from_numpy(source.tensors[f"{layer}.gate.weight"]).double().T, dim=-1)
    top = score.topk(2)
    weight = top.values / top.values.sum(-1, keepdim=True) if renormalize else top.values
    want = gated(source, f"{layer}.shared_experts", tx) + torch.from_numpy(residual)
    for e in range(config.n_routed_experts):
        share = (weight * (top.indices == e)).sum(-1, keepdim=True) * 1.5
        want += share * gated(source, f"{layer}.experts.{e}", tx)
    assert np.abs(feed_forward(x, weights, config, residual, exact) - want.numpy()).max() <= 1e-12


def test_without_shared_expert(source):
    config = dataclasses.replace(CONFIG, n_shared_experts=0)
    weights = feed_forward_weights(source.at("model.layers.4.mlp."), config, 4)
    assert weights.experts.shared_gate_up is None and weights.experts.shared_down is None
    x = np.random.default_rng(2).normal(size=(3, CONFIG.hidden_size))
    full = feed_forward_weights(source.at("model.layers.4.mlp."), CONFIG, 4)
    shared = gated(source, "model.layers.4.mlp.shared_experts", torch.from_numpy(x)).numpy()
    difference = feed_forward(x, full, CONFIG, x, exact) - feed_forward(x, weights, config, x, exact)
    assert np.abs(difference - shared).max() <= 1e-12
