"""Greedy decoding of many texts of one length at once, in plain PyTorch: the latents are cached, attention is absorbed.

The engine decodes a few streams exactly; this decodes thousands fast, to make text for training, and promises no bits.
"""

from __future__ import annotations

import torch

from kdtree_nb.train.plain_layers import Attention, rope_table
from kdtree_nb.train.plain_model import PlainModel

MAX_PREFILL_TOKENS = 1 << 16
"""Prompt tokens of one forward pass."""


@torch.no_grad()
def greedy_batch(model: PlainModel, prompt: torch.Tensor, num_tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """prompt int64 [N, P] -> int64 [N, P + num_tokens]: every text's most likely next tokens; dtype of activations."""
    N, P = prompt.shape
    total, config = P + num_tokens, model.config
    tokens = torch.cat([prompt, prompt.new_zeros(N, num_tokens)], 1)
    cache = torch.zeros(config.num_hidden_layers, N, total, config.latent_dim, dtype=dtype, device=prompt.device)
    like = torch.empty(0, dtype=dtype, device=prompt.device)
    cos, sin = rope_table(total, config.qk_rope_head_dim, config.rope_theta, like)
    rows = max(1, MAX_PREFILL_TOKENS // P)
    for start in range(0, N, rows):
        part = slice(start, start + rows)
        tokens[part, P] = _prefill(model, prompt[part], cache[:, part], cos[:P], sin[:P], dtype)
    for position in range(P, total - 1):
        turn = slice(position, position + 1)
        tokens[:, position + 1] = _step(model, tokens[:, position], cache, position, cos[turn], sin[turn], dtype)
    return tokens


def _prefill(
    model: PlainModel,
    prompt: torch.Tensor,
    cache: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Fill the cache with the prompt's latents; the next token of each text."""
    x = model.embed_tokens(prompt).to(dtype)
    for index, layer in enumerate(model.layers):
        projected = layer.self_attn.project(layer.input_layernorm(x), cos, sin)
        cache[index, :, : prompt.shape[1]] = torch.cat(projected[2:], -1)
        x = layer.feed_forward(x + layer.self_attn.attend(*projected))[0]
    return model.head(model.norm(x[:, -1])).argmax(-1)


def _step(
    model: PlainModel, token: torch.Tensor, cache: torch.Tensor, position: int, cos: torch.Tensor, sin: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """One token of each text, at `position`, into the cache; the next token of each."""
    x = model.embed_tokens(token[:, None]).to(dtype)
    for index, layer in enumerate(model.layers):
        q_nope, q_rope, latent, k_rope = layer.self_attn.project(layer.input_layernorm(x), cos, sin)
        cache[index, :, position] = torch.cat([latent, k_rope], -1)[:, 0]
        x = x + _attend(layer.self_attn, q_nope[:, 0], q_rope[:, 0], cache[index, :, : position + 1])[:, None]
        x = layer.feed_forward(x)[0]
    return model.head(model.norm(x[:, 0])).argmax(-1)


def _attend(attention: Attention, q_nope: torch.Tensor, q_rope: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Absorbed attention of one query a text: q_* [N, H, *], cache [N, T, C + R] -> [N, hidden]."""
    config = attention.config
    expand = attention.kv_b_proj.weight.to(cache.dtype).unflatten(0, (config.num_attention_heads, -1))
    w_k, w_v = expand.split([config.qk_nope_head_dim, config.v_head_dim], 1)
    q = torch.cat([torch.einsum("nhd,hdc->nhc", q_nope, w_k), q_rope], -1)
    weight = ((q @ cache.mT).float() * config.softmax_scale).softmax(-1).to(cache.dtype)
    mixed = weight @ cache[..., : config.kv_lora_rank]
    return attention.o_proj(torch.einsum("nhc,hdc->nhd", mixed, w_v).flatten(1))
