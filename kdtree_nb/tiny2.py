"""tiny2: a small model of odd dimensions with random weights, to prove that no size is hard-coded anywhere.

The weights are made from the raw 64-bit outputs of PCG64, whose stream numpy guarantees, by exact arithmetic only, so
they are the same bits with every numpy version on every machine. All are BF16 values.
"""

from __future__ import annotations

import math

import numpy as np

from kdtree_nb.config import ModelConfig

SEED = 1
"""Seed of the weights that the goldens were made with."""


def tiny2_config() -> ModelConfig:
    """6 layers (2 dense), odd sizes everywhere, unnormalised routing weights scaled by 1.5, no end-of-text token."""
    return ModelConfig(
        vocab_size=331,
        hidden_size=192,
        num_hidden_layers=6,
        first_k_dense_replace=2,
        num_attention_heads=6,
        kv_lora_rank=48,
        qk_nope_head_dim=24,
        qk_rope_head_dim=12,
        v_head_dim=20,
        intermediate_size=320,
        moe_intermediate_size=72,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_shared_experts=1,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        max_position_embeddings=2048,
        norm_topk_prob=False,
        routed_scaling_factor=1.5,
    )


def tiny2_weights(seed: int = SEED) -> dict[str, np.ndarray]:
    """Checkpoint name -> float32 array. Same seed, same bits."""
    raw = np.random.PCG64(seed)
    return {name: _tensor(raw, name, shape) for name, shape in _shapes()}


def _tensor(raw: np.random.PCG64, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """One tensor. A linear layer [N, K] keeps the size of its input: standard deviation near 1/sqrt(K).

    Embeddings have a standard deviation near 1, large enough beside what the layers add that FP32 stays close to
    float64. Smaller ones make the network chaotic, smaller layers make it repeat one token.
    """
    if len(shape) == 1:
        return (96 + _bytes(raw, shape) // 4) / 128  # a norm: 0.75 … 1.25 in steps of 1/128
    scale = 2.0 if name == "model.embed_tokens.weight" else 2.0 ** round(math.log2(math.sqrt(3 / shape[1])))
    return (2 * _bytes(raw, shape) - 255) / 256 * np.float32(scale)  # odd multiples of 1/256 in -1 … 1, scaled


def _bytes(raw: np.random.PCG64, shape: tuple[int, ...]) -> np.ndarray:
    """Uniform integers 0 … 255 as float32: the upper byte of each raw output."""
    return (raw.random_raw(math.prod(shape)) >> 56).astype(np.float32).reshape(shape)


def _shapes() -> list[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor, in the order in which the random stream fills them."""
    c = tiny2_config()
    dim, heads = c.hidden_size, c.num_attention_heads
    shapes: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens", (c.vocab_size, dim))]
    for i in range(c.num_hidden_layers):
        layer = f"model.layers.{i}"
        shapes += [
            (f"{layer}.input_layernorm", (dim,)),
            (f"{layer}.self_attn.q_proj", (heads * c.q_head_dim, dim)),
            (f"{layer}.self_attn.kv_a_proj_with_mqa", (c.latent_dim, dim)),
            (f"{layer}.self_attn.kv_a_layernorm", (c.kv_lora_rank,)),
            (f"{layer}.self_attn.kv_b_proj", (heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)),
            (f"{layer}.self_attn.o_proj", (dim, heads * c.v_head_dim)),
            (f"{layer}.post_attention_layernorm", (dim,)),
        ]
        if c.is_dense_layer(i):
            shapes += _gated(f"{layer}.mlp", c.intermediate_size, dim)
            continue
        shapes.append((f"{layer}.mlp.gate", (c.n_routed_experts, dim)))
        for e in range(c.n_routed_experts):
            shapes += _gated(f"{layer}.mlp.experts.{e}", c.moe_intermediate_size, dim)
        shapes += _gated(f"{layer}.mlp.shared_experts", c.shared_intermediate_size, dim)
    shapes += [("model.norm", (dim,)), ("lm_head", (c.vocab_size, dim))]
    return [(f"{name}.weight", shape) for name, shape in shapes]


def _gated(prefix: str, width: int, dim: int) -> list[tuple[str, tuple[int, ...]]]:
    return [
        (f"{prefix}.gate_proj", (width, dim)),
        (f"{prefix}.up_proj", (width, dim)),
        (f"{prefix}.down_proj", (dim, width)),
    ]
