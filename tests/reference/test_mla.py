"""The absorbed and the naive form of MLA are the same function, the one that the checkpoint's tensors define."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kdtree_nb.reference import (
    Precision,
    Weights,
    chain_trees,
    mla_absorbed,
    mla_naive,
    mla_weights,
    path,
    rope_table,
    tree_build,
    tree_rows,
)
from kdtree_nb.tiny2 import tiny2_config, tiny2_weights

CONFIG = tiny2_config()
COS_SIN = rope_table(100, CONFIG.qk_rope_head_dim, CONFIG.rope_theta)


PREFIX = "model.layers.3.self_attn."
TENSORS = {name: weight for name, weight in tiny2_weights().items() if name.startswith(PREFIX)}


@pytest.fixture(scope="module")
def weights():
    source = Weights(TENSORS, Precision.named("float64"))
    taken = mla_weights(source.at(PREFIX), CONFIG)
    source.check_all_taken()
    return taken


def turn(x):
    """Rotate the pairs (i, i + R/2) of row t by t · theta^(-2i/R), as complex numbers: x [T, heads, R]."""
    half = x.shape[-1] // 2
    angle = torch.outer(torch.arange(len(x)).double(), CONFIG.rope_theta ** (-torch.arange(half).double() / half))
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * angle)[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1)


def by_definition(x):
    """Causal attention of one text in torch: keys and values of every head, straight from the checkpoint's tensors."""
    w = {name.removeprefix(PREFIX).removesuffix(".weight"): torch.from_numpy(t).double() for name, t in TENSORS.items()}
    x, heads, nope = torch.from_numpy(x), CONFIG.num_attention_heads, CONFIG.qk_nope_head_dim
    q_nope, q_rope = (x @ w["q_proj"].T).view(len(x), heads, -1).split([nope, CONFIG.qk_rope_head_dim], dim=-1)
    latent, k_rope = (x @ w["kv_a_proj_with_mqa"].T).split([CONFIG.kv_lora_rank, CONFIG.qk_rope_head_dim], dim=-1)
    latent = torch.nn.functional.rms_norm(latent, latent.shape[1:], w["kv_a_layernorm"], CONFIG.rms_norm_eps)
    k_nope, value = (latent @ w["kv_b_proj"].T).view(len(x), heads, -1).split([nope, CONFIG.v_head_dim], dim=-1)
    q = torch.cat([q_nope, turn(q_rope)], dim=-1)
    k = torch.cat([k_nope, turn(k_rope[:, None]).expand(-1, heads, -1)], dim=-1)
    attend = torch.nn.functional.scaled_dot_product_attention
    scale = (nope + CONFIG.qk_rope_head_dim) ** -0.5
    out = attend(*(t.transpose(0, 1) for t in (q, k, value)), is_causal=True, scale=scale)
    return (out.transpose(0, 1).flatten(1) @ w["o_proj"].T).numpy()


def absorbed(x, weights, cache, tree, prefix_len, residual=None):
    return mla_absorbed(x, weights, CONFIG, COS_SIN, cache, tree_rows(tree, prefix_len), tree, prefix_len, residual)


def test_text(weights):
    rng = np.random.default_rng(0)
    x, residual = rng.normal(size=(2, 40, CONFIG.hidden_size))
    cache = np.full((1, 40, CONFIG.latent_dim), np.nan)
    position = np.arange(40)
    naive = mla_naive(x, weights, CONFIG, COS_SIN, position, position[:, None] >= position, residual)
    tree = chain_trees([[0] * 40])
    whole = absorbed(x, weights, cache, tree, np.array([0]), residual)
    assert np.abs(whole - naive).max() <= 1e-12
    assert np.abs(naive - (by_definition(x) + residual)).max() <= 1e-12
    for i in (38, 39):  # again, one token at a time over the cache
        single = absorbed(x[i : i + 1], weights, cache, chain_trees([[0]]), np.array([i]), residual[i : i + 1])
        assert np.abs(single - naive[i]).max() <= 1e-12


def test_tree_after_prefix(weights):
    rng = np.random.default_rng(1)
    prefix, num_nodes = 13, 31
    log_probs = -np.sort(rng.exponential(size=(1, 5, 4))).astype(np.float32)
    tree = tree_build(log_probs, np.broadcast_to(np.arange(4), log_probs.shape), [0], num_nodes - 1)
    assert tree.depth.max() >= 3 and tree.num_nodes[0] == num_nodes
    x = rng.normal(size=(prefix + num_nodes, CONFIG.hidden_size))
    visible = np.tri(prefix + num_nodes, dtype=bool)
    for node in range(num_nodes):
        visible[prefix + node, prefix:] = False
        visible[prefix + node, [prefix + a for a in path(tree, 0, node)]] = True
    position = np.concatenate([np.arange(prefix), prefix + tree.depth[0]])
    naive = mla_naive(x, weights, CONFIG, COS_SIN, position, visible)
    cache = np.full((1, prefix + num_nodes, CONFIG.latent_dim), np.nan)
    absorbed(x[:prefix], weights, cache, chain_trees([[0] * prefix]), np.array([0]))
    out = absorbed(x[prefix:], weights, cache, tree, np.array([prefix]))
    assert np.abs(out - naive[prefix:]).max() <= 1e-12
