"""The absorbed and the naive form of MLA are the same function."""

from __future__ import annotations

import numpy as np
import pytest

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
from kdtree_nb.train.tiny2 import tiny2_config, tiny2_weights

CONFIG = tiny2_config()
COS_SIN = rope_table(100, CONFIG.qk_rope_head_dim, CONFIG.rope_theta)


@pytest.fixture(scope="module")
def weights():
    names = {n: w for n, w in tiny2_weights().items() if ".layers.3.self_attn." in n}
    source = Weights(names, Precision.named("float64"))
    taken = mla_weights(source.at("model.layers.3.self_attn."), CONFIG)
    source.check_all_taken()
    return taken


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
    assert np.abs(naive - residual).max() > 0.1
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
