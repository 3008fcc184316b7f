from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from kdtree_nb import ops, reference
from kdtree_nb.model import LatentCache
from kdtree_nb.model.mla import Attention
from kdtree_nb.model.rotary import rope_table
from kdtree_nb.tiny2 import tiny2_config

CONFIG = tiny2_config()


def test_rope_table_is_the_float64_table_rounded_once():
    exact = reference.rope_table(CONFIG.max_position_embeddings, CONFIG.qk_rope_head_dim, CONFIG.rope_theta)
    table = rope_table(CONFIG, torch.device("cpu"))
    assert table.dtype == torch.float32
    np.testing.assert_array_equal(table.numpy(), exact.astype(np.float32))


@pytest.mark.parametrize("prefix_len", [0, 70])
def test_attention_equals_the_naive_form_on_a_tree(prefix_len):
    """A prefix, then a tree of 9 nodes over it: the absorbed block against keys and values written out per head."""
    rng = np.random.default_rng(5)
    H, D, C, R = CONFIG.num_attention_heads, CONFIG.hidden_size, CONFIG.kv_lora_rank, CONFIG.qk_rope_head_dim
    shapes = {
        "q_proj": (H * CONFIG.q_head_dim, D), "kv_a": (C + R, D), "kv_b": (H * (CONFIG.qk_nope_head_dim + 20), C),
        "o_proj": (D, H * 20),
    }  # fmt: skip
    weights = {n: (rng.standard_normal(s) / np.sqrt(s[1])).astype(np.float32) for n, s in shapes.items()}
    norms = {"norm": np.ones(D, np.float32), "kv_norm": rng.uniform(0.5, 1.5, C).astype(np.float32)}
    block = Attention(
        CONFIG, 0, **{n: torch.from_numpy(w) for n, w in (weights | norms).items()},
        cos_sin=rope_table(CONFIG, torch.device("cpu")),
    )  # fmt: skip
    num_rows = prefix_len + 9
    x = rng.standard_normal((num_rows, D)).astype(np.float32)
    tree = ops.tree_build(
        torch.log_softmax(torch.randn(1, 4, 5, generator=torch.Generator().manual_seed(3)), 2).sort(2, True).values,
        torch.arange(5).expand(1, 4, 5).contiguous(), torch.tensor([7]), 8,
    )  # fmt: skip
    got = run(block, torch.from_numpy(x), tree, prefix_len)
    visible = np.tri(num_rows, dtype=bool)
    visible[prefix_len:, prefix_len:] = tree.visibility(0).numpy()
    position = np.concatenate([np.arange(prefix_len), prefix_len + tree.depth[0].numpy()])
    want = naive(weights, norms, x.astype(np.float64), position, visible)
    assert np.abs(got - want).max() <= 1e-5 * max(1.0, np.abs(want).max())


def run(block, x, tree, prefix_len):
    """The block over a chain of prefix_len rows, then over the tree."""
    cache = LatentCache(dataclasses.replace(CONFIG, num_hidden_layers=2), 1, len(x), torch.float32, x.device)
    cache.data.fill_(torch.nan)
    outputs, start = [], torch.zeros(1, dtype=torch.int32)
    if prefix_len:
        ids = torch.zeros(1, prefix_len - 1, 1, dtype=torch.int64)
        chain = ops.tree_build(torch.zeros(ids.shape), ids, torch.tensor([0]), prefix_len - 1)
        outputs.append(block(x[:prefix_len], ops.tree_rows(chain, start), chain, cache, start))
        start += prefix_len
    outputs.append(block(x[prefix_len:], ops.tree_rows(tree, start), tree, cache, start))
    return torch.cat(outputs).numpy()


def naive(weights, norms, x, position, visible):
    """The reference's naive form in float64."""
    heads, nope = CONFIG.num_attention_heads, CONFIG.qk_nope_head_dim
    kv_b = weights["kv_b"].astype(np.float64).reshape(heads, nope + CONFIG.v_head_dim, CONFIG.kv_lora_rank)
    packed = reference.MlaWeights(
        weights["q_proj"].astype(np.float64), weights["kv_a"].astype(np.float64), norms["kv_norm"].astype(np.float64),
        kv_b[:, :nope].swapaxes(1, 2), kv_b[:, nope:], weights["o_proj"].astype(np.float64),
    )  # fmt: skip
    table = reference.rope_table(CONFIG.max_position_embeddings, CONFIG.qk_rope_head_dim, CONFIG.rope_theta)
    h = reference.rms_norm(x, norms["norm"].astype(np.float64), CONFIG.rms_norm_eps)
    return reference.mla_naive(h, packed, CONFIG, table, position, visible, x)
