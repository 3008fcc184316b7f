"""The whole model against the numpy reference, over configurations of many shapes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from kdtree_nb import ops, reference
from kdtree_nb.goldens import fp32_tolerance
from kdtree_nb.model import build_model
from kdtree_nb.speculate.drafting import chain_trees
from kdtree_nb.tiny2 import tiny2_config

BASE = dataclasses.replace(
    tiny2_config(), vocab_size=41, hidden_size=40, num_hidden_layers=2, first_k_dense_replace=1, num_attention_heads=3,
    kv_lora_rank=20, qk_nope_head_dim=7, qk_rope_head_dim=6, v_head_dim=9, intermediate_size=50,
    moe_intermediate_size=33, n_routed_experts=5, num_experts_per_tok=3, max_position_embeddings=256,
)  # fmt: skip
CONFIGS = {
    "odd sizes": BASE,
    "one head, one expert, one value": dataclasses.replace(
        BASE, num_attention_heads=1, n_routed_experts=1, num_experts_per_tok=1, v_head_dim=1
    ),
    "no dense layer, two shared experts": dataclasses.replace(BASE, first_k_dense_replace=0, n_shared_experts=2),
    "dense only": dataclasses.replace(BASE, first_k_dense_replace=2),
    "no shared expert, renormalised": dataclasses.replace(BASE, n_shared_experts=0, norm_topk_prob=True),
    "sigmoid": dataclasses.replace(BASE, scoring_func="sigmoid", norm_topk_prob=True, routed_scaling_factor=2.5),
    "multiples of 32": dataclasses.replace(
        BASE, hidden_size=64, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32
    ),
}


def random_weights(config, seed=0):
    """Float32 arrays under checkpoint names, sizes from the configuration."""
    rng = np.random.default_rng(seed)
    c, D, H = config, config.hidden_size, config.num_attention_heads
    shapes = {"model.embed_tokens": (c.vocab_size, D), "model.norm": (D,), "lm_head": (c.vocab_size, D)}
    for i in range(c.num_hidden_layers):
        at = f"model.layers.{i}."
        shapes |= {at + "input_layernorm": (D,), at + "post_attention_layernorm": (D,)}
        shapes |= {
            at + "self_attn.q_proj": (H * c.q_head_dim, D), at + "self_attn.kv_a_proj_with_mqa": (c.latent_dim, D),
            at + "self_attn.kv_a_layernorm": (c.kv_lora_rank,), at + "self_attn.o_proj": (D, H * c.v_head_dim),
            at + "self_attn.kv_b_proj": (H * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank),
        }  # fmt: skip
        if config.is_dense_layer(i):
            blocks = {"mlp": c.intermediate_size}
        else:
            shapes[at + "mlp.gate"] = (c.n_routed_experts, D)
            blocks = {f"mlp.experts.{e}": c.moe_intermediate_size for e in range(c.n_routed_experts)}
            blocks |= {"mlp.shared_experts": c.shared_intermediate_size} if c.n_shared_experts else {}
        for block, width in blocks.items():
            shapes |= {f"{at}{block}.gate_proj": (width, D), f"{at}{block}.up_proj": (width, D)}
            shapes[f"{at}{block}.down_proj"] = (D, width)
    return {
        f"{name}.weight": (rng.uniform(0.5, 1.5, s) if len(s) == 1 else rng.standard_normal(s) * 1.5 / np.sqrt(s[1]))
        .astype(np.float32)
        for name, s in shapes.items()
    }  # fmt: skip


def logits_of(model, tokens):
    prefix_len = torch.zeros(1, dtype=torch.int32, device=model.device)
    tree = chain_trees([tokens], model.device)
    return model.forward(ops.tree_rows(tree, prefix_len), tree, model.new_cache(1, len(tokens)), prefix_len)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("form", ["absorbed", "naive"])
def test_fp32_logits_equal_the_float64_reference(name, form, device):
    config = CONFIGS[name]
    weights = random_weights(config)
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, 90).tolist()
    want = reference.ReferenceModel(config, weights).logits(tokens, form)
    got = logits_of(build_model(config, weights, device), tokens).cpu().numpy()
    assert np.abs(got - want).max() <= fp32_tolerance(want)


@pytest.mark.parametrize("name", CONFIGS)
def test_bf16_logits_follow_the_rounding_table(name, device):
    """Nearer to the reference that rounds at the same points than BF16 is to exact arithmetic."""
    config = CONFIGS[name]
    weights = {n: reference.round_bf16(w).astype(np.float32) for n, w in random_weights(config).items()}
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, 90).tolist()
    exact = reference.ReferenceModel(config, weights).logits(tokens)
    rounded = reference.ReferenceModel(config, weights, "bf16").logits(tokens)
    got = logits_of(build_model(config, weights, device, torch.bfloat16), tokens).cpu().numpy()
    # Per position, and the median of them: one expert chosen otherwise, at a near tie, moves few positions a lot.
    to_rounded, to_exact = (np.median(np.sqrt(np.mean((got - other) ** 2, axis=-1))) for other in (rounded, exact))
    # A GPU rounds P relative to a maximum that moves with the keys, the reference relative to the final one.
    nearer = 0.5 if device.type == "cpu" else 0.75
    assert to_rounded <= nearer * to_exact


def test_logits_are_left_out_where_they_are_not_needed():
    model = build_model(BASE, random_weights(BASE))
    prefix_len = torch.zeros(1, dtype=torch.int32)
    tree = chain_trees([[1, 2]], model.device)
    rows, cache = ops.tree_rows(tree, prefix_len), model.new_cache(1, 2)
    assert model.forward(rows, tree, cache, prefix_len, need_logits=False) is None


def test_a_token_outside_the_vocabulary_and_a_full_cache_are_errors():
    model = build_model(BASE, random_weights(BASE))
    with pytest.raises(ValueError, match="embed"):
        logits_of(model, [1, 41])
    prefix_len = torch.zeros(1, dtype=torch.int32)
    tree = chain_trees([[1, 2, 3]], model.device)
    with pytest.raises(ValueError, match="latent_append: slot"):
        model.forward(ops.tree_rows(tree, prefix_len), tree, model.new_cache(1, 2), prefix_len)
