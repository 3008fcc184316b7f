"""context_append and block_attn: a block drafter's context, and the attention of a block of tokens behind it."""

from __future__ import annotations

import numpy as np

from kdtree_nb.reference.precision import Rounding, exact
from kdtree_nb.reference.rms_norm import rms_norm
from kdtree_nb.reference.rope import rope


def _turned(
    x: np.ndarray, weight: np.ndarray, eps: float, cos_sin: np.ndarray, position: np.ndarray, rounding: Rounding
) -> np.ndarray:
    """Heads [T, n, d], normalised with weight [d] or [n, d], turned to position [T] and rounded once."""
    return rope(rms_norm(x, weight, eps), cos_sin, position, rounding)


def context_append(
    keys: np.ndarray, values: np.ndarray, kv: np.ndarray, key_norm: np.ndarray, eps: float, cos_sin: np.ndarray,
    stream: np.ndarray, position: np.ndarray, rounding: Rounding = exact,
) -> None:  # fmt: skip
    """Keys and values of T tokens into slots [stream, position] of all layers: keys and values [S, P, Y, K, d].

    kv [T, 2, Y, K, d] or the same flat, key_norm [Y, d], cos_sin [Q, d], stream and position int [T]; a position of -1
    is no token. Raises ValueError for a place outside.
    """
    is_token = np.asarray(position) != -1
    stream, position = np.asarray(stream)[is_token], np.asarray(position)[is_token]
    for name, index, size in (("stream", stream, keys.shape[0]), ("position", position, keys.shape[1])):
        outside = index[(index < 0) | (index >= size)]
        if outside.size:
            raise ValueError(f"context_append: expected {name} in 0 … {size - 1}, got {outside[0]}")
    num_layers, num_heads, dim = keys.shape[2:]
    new = kv[is_token].reshape(len(position), 2, num_layers, num_heads, dim)
    for layer in range(num_layers):
        heads = _turned(new[:, 0, layer], key_norm[layer], eps, cos_sin, position, rounding)
        keys[stream, position, layer], values[stream, position, layer] = heads, new[:, 1, layer]


def block_sees(prefix_len: int, block_size: int, window: int | None = None, causal: bool = False) -> np.ndarray:
    """bool [b, prefix_len + b]: which positions each token of a block behind prefix_len others sees.

    All of the context and of the block; where causal, not what stands behind it; with a window, only what stands less
    than that away.
    """
    token = prefix_len + np.arange(block_size)[:, None]
    position = np.arange(prefix_len + block_size)
    seen = np.full((block_size, len(position)), True)
    if causal:
        seen &= position <= token
    if window is not None:
        seen &= np.abs(token - position) < window
    return seen


def block_attn(
    qkv: np.ndarray, query_norm: np.ndarray, key_norm: np.ndarray, eps: float, cos_sin: np.ndarray, keys: np.ndarray,
    values: np.ndarray, layer: int, stream: np.ndarray, prefix_len: np.ndarray, scale: float,
    window: int | None = None, causal: bool = False, rounding: Rounding = exact,
) -> np.ndarray:  # fmt: skip
    """Attention of A blocks of b tokens to their contexts and to themselves, in one layer -> [A, b, Hd].

    qkv [A, b, (H + 2K) d] or [A, b, H + 2K, d]: queries, keys, values; keys and values [S, P, Y, K, d]; stream and
    prefix_len int [A]; what a token sees is `block_sees`.
    """
    num_kv_heads, dim = keys.shape[3:]
    num_blocks, block_size = qkv.shape[:2]
    qkv = qkv.reshape(num_blocks, block_size, -1, dim)
    num_heads = qkv.shape[2] - 2 * num_kv_heads
    out = np.empty((num_blocks, block_size, num_heads, dim))
    for a, (s, prefix) in enumerate(zip(stream, prefix_len, strict=True)):
        place = prefix + np.arange(block_size)
        query = _turned(qkv[a, :, :num_heads], query_norm, eps, cos_sin, place, rounding)
        own = _turned(qkv[a, :, num_heads:-num_kv_heads], key_norm, eps, cos_sin, place, rounding)
        key = np.concatenate([keys[s, :prefix, layer], own])  # [prefix + b, K, d]
        value = np.concatenate([values[s, :prefix, layer], qkv[a, :, -num_kv_heads:]])
        for i, seen in enumerate(block_sees(prefix, block_size, window, causal)):
            for head in range(num_heads):
                kv = head * num_kv_heads // num_heads
                score = scale * (key[seen, kv] @ query[i, head])
                p = np.exp(score - score.max())
                out[a, i, head] = p @ value[seen, kv] / p.sum()
    return rounding(out.reshape(num_blocks, block_size, -1))
