"""Multi-head latent attention (MLA), twice: absorbed, as the engine runs it, and naive, as it is defined.

Every token leaves one latent vector [C] and one rotated key [R], which all heads share. The naive form expands the
latent into a key and a value per head. The absorbed form never does: a score is q · (W_k latent) = (W_kᵀ q) · latent,
and Σ p · (W_v latent) = W_v (Σ p · latent). So W_k moves to the query, W_v to the output, and the cache holds C + R
values per token.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kdtree_nb.config import ModelConfig
from kdtree_nb.reference.cache import cache_append
from kdtree_nb.reference.linear import linear, linear_heads
from kdtree_nb.reference.precision import Rounding, exact
from kdtree_nb.reference.rms_norm import rms_norm
from kdtree_nb.reference.rope import rope
from kdtree_nb.reference.tree import Tree
from kdtree_nb.reference.tree_rows import Rows
from kdtree_nb.reference.verify_attn import verify_attn
from kdtree_nb.reference.weights import Weights


class MlaWeights(NamedTuple):
    """Weights of one attention block: D hidden size, H heads, C latent, nope + R query head, v value head."""

    q_proj: np.ndarray  # [H·(nope+R), D], or [H·(nope+R), Q] behind a query latent
    kv_a_proj: np.ndarray  # [C+R, D]
    kv_a_norm: np.ndarray  # [C]
    w_kc: np.ndarray  # [H, C, nope]: the key part of kv_b_proj, transposed per head
    w_vc: np.ndarray  # [H, v, C]: the value part of kv_b_proj
    o_proj: np.ndarray  # [D, H·v]
    q_a_proj: np.ndarray | None = None  # [Q, D], where queries come from a latent of their own
    q_a_norm: np.ndarray | None = None  # [Q]


def mla_weights(weights: Weights, config: ModelConfig) -> MlaWeights:
    """Read one block's tensors and split kv_b_proj [H·(nope+v), C] into its key and value parts."""
    dim, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    nope, value = config.qk_nope_head_dim, config.v_head_dim
    kv_b = weights.take("kv_b_proj", heads * (nope + value), latent).reshape(heads, nope + value, latent)
    Q = config.q_lora_rank
    return MlaWeights(
        q_proj=weights.take("q_proj" if Q is None else "q_b_proj", heads * config.q_head_dim, Q or dim),
        kv_a_proj=weights.take("kv_a_proj_with_mqa", config.latent_dim, dim),
        kv_a_norm=weights.take("kv_a_layernorm", latent),
        w_kc=kv_b[:, :nope].swapaxes(1, 2),
        w_vc=kv_b[:, nope:],
        o_proj=weights.take("o_proj", dim, heads * value),
        q_a_proj=None if Q is None else weights.take("q_a_proj", Q, dim),
        q_a_norm=None if Q is None else weights.take("q_a_layernorm", Q),
    )


def project(
    x: np.ndarray,
    weights: MlaWeights,
    config: ModelConfig,
    cos_sin: np.ndarray,
    position: np.ndarray,
    rounding: Rounding = exact,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """What both forms share: x [T, D] -> q_nope [T, H, nope], q_rope [T, H, R], latent [T, C], k_rope [T, R]."""
    eps, q_input = config.attention_eps, x
    if weights.q_a_proj is not None:
        q_input = rms_norm(linear(x, weights.q_a_proj, rounding=rounding), weights.q_a_norm, eps, rounding)
    q = linear(q_input, weights.q_proj, rounding=rounding)
    q = q.reshape(len(x), config.num_attention_heads, config.q_head_dim)
    q_nope, q_rope = np.split(q, [config.qk_nope_head_dim], axis=-1)
    kv = linear(x, weights.kv_a_proj, rounding=rounding)
    latent, k_rope = np.split(kv, [config.kv_lora_rank], axis=-1)
    latent = rms_norm(latent, weights.kv_a_norm, eps, rounding)
    q_rope = rope(q_rope, cos_sin, position, rounding)
    k_rope = rope(k_rope[:, None], cos_sin, position, rounding)[:, 0]  # one head, shared by all query heads
    return q_nope, q_rope, latent, k_rope


def mla_absorbed(
    x: np.ndarray,
    weights: MlaWeights,
    config: ModelConfig,
    cos_sin: np.ndarray,
    cache: np.ndarray,
    rows: Rows,
    tree: Tree,
    prefix_len: np.ndarray,
    residual: np.ndarray | None = None,
    rounding: Rounding = exact,
) -> np.ndarray:
    """Attention of the rows of a step over one layer's cache [S, P, C+R]: x [T, D] -> [T, D] (+ residual).

    Writes the rows' latents into the cache first, because every node also attends to itself.
    """
    q_nope, q_rope, latent, k_rope = project(x, weights, config, cos_sin, rows.position, rounding)
    cache_append(cache, latent, k_rope, rows.stream, rows.slot)
    q_latent = linear_heads(q_nope, weights.w_kc, rounding)
    mixed = verify_attn(q_latent, q_rope, cache, rows, tree, prefix_len, config.softmax_scale, rounding)
    values = linear_heads(mixed, weights.w_vc, rounding)
    return linear(values.reshape(len(x), -1), weights.o_proj, residual, rounding)


def mla_naive(
    x: np.ndarray,
    weights: MlaWeights,
    config: ModelConfig,
    cos_sin: np.ndarray,
    position: np.ndarray,
    visible: np.ndarray,
    residual: np.ndarray | None = None,
) -> np.ndarray:
    """Attention of one stream without a cache: x [T, D], position int [T], visible bool [T, T] -> [T, D] (+ residual).

    Row i attends to the rows j with visible[i, j]; a causal mask for text, ancestors for a tree.
    """
    q_nope, q_rope, latent, k_rope = project(x, weights, config, cos_sin, position)
    k_nope = np.einsum("hcn,tc->thn", weights.w_kc, latent)
    value = np.einsum("hvc,tc->thv", weights.w_vc, latent)
    scores = np.einsum("ihn,jhn->hij", q_nope, k_nope) + np.einsum("ihr,jr->hij", q_rope, k_rope)
    scores = np.where(visible, config.softmax_scale * scores, -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    values = np.einsum("hij,jhv->ihv", p, value)
    return linear(values.reshape(len(x), -1), weights.o_proj, residual)
