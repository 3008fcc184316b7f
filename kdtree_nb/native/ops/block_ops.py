"""Operations of block drafters: keys and values of their contexts, and the attention of a block of tokens behind them.

T committed tokens, A blocks of b tokens, S streams of P slots, Y layers, H query heads and K key-value heads of length
d, Q positions whose angles are known. "float" is f32 or bf16, the same for all float arguments of a call. A block's
result has the same bits whatever other blocks it is computed beside. On a GPU values are not looked at: see each
operation.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kdtree_nb.native.ops.namespace import native


def context_append(
    keys: Tensor, values: Tensor, kv: Tensor, key_norm: Tensor, eps: float, cos_sin: Tensor, stream: Tensor,
    position: Tensor,
) -> None:  # fmt: skip
    """Keys and values of T committed tokens into slots [stream[t], position[t]] of all layers, in place.

    keys and values float [S, P, Y, K, d]; kv float [T, 2YKd], keys of all layers, then values; key_norm float [Y, d];
    cos_sin f32 [Q, d], d/2 cosines, then d/2 sines; stream and position i32 [T]. Each head of a key goes through
    `rms_norm` with its layer's weights and `rope`, and is rounded once, behind both. A position of -1 says that there
    is no token. Raises ValueError for a stream or position outside, before anything is written; on a GPU nothing is
    written for it.
    """
    native.context_append(keys, values, kv, key_norm, eps, cos_sin, stream, position)


def block_attn(
    qkv: Tensor, query_norm: Tensor, key_norm: Tensor, eps: float, cos_sin: Tensor, keys: Tensor, values: Tensor,
    layer: int, stream: Tensor, prefix_len: Tensor, scale: float, window: int | None = None, causal: bool = False,
) -> Tensor:  # fmt: skip
    """Attention of A blocks of tokens to their contexts and to themselves, in one layer -> float [A, b, Hd].

    qkv float [A, b, (H + 2K) d]: each token's queries, keys and values; query_norm and key_norm float [d]; cos_sin f32
    [Q, d]; keys and values float [S, P, Y, K, d], as context_append leaves them; stream and prefix_len i32 [A]: block a
    stands at positions prefix_len[a] + 0 … b - 1 of stream[a], whose slots 0 … prefix_len[a] - 1 are its context.
    Several blocks may belong to one stream. Queries and keys of the block are normalised, turned and rounded as in
    context_append. Scores are multiplied by `scale`.

    causal: tokens of the block do not see those behind them. window: they see only what stands less than that away.
    Slots that no token of a block sees are not read. d is even and at most 256, b at most 64. Raises ValueError for a
    stream or prefix_len outside; on a GPU such a block becomes NaN.
    """
    return native.block_attn(
        qkv, query_norm, key_norm, eps, cos_sin, keys, values, layer, stream, prefix_len, scale, window or 0, causal
    )


def accepted_features(
    hidden: Sequence[Tensor], first_row: Tensor, prefix_len: Tensor, accepted_path: Tensor, num_accepted: Tensor,
    active: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The hidden states of what a verified step has accepted: (features float [S (L + 1), nD], stream and position i32
    [S (L + 1)]).

    hidden: float [R, D] of all R rows, behind each of n = 1 … 8 layers. Per stream i32 [S]: first_row, the row of the
    root; prefix_len, its position; num_accepted; active, not 0 where it takes part. accepted_path i32 [S, L] of
    `tree_accept`. Each stream has L + 1 places, for the root and the nodes of its path; where there is no token,
    features are 0, stream and position -1. Raises ValueError for rows outside; on a GPU their features are NaN and
    their position is -1.
    """
    return native.accepted_features(list(hidden), first_row, prefix_len, accepted_path, num_accepted, active)


@native.fake
def accepted_features_fake(
    hidden: Sequence[Tensor], first_row: Tensor, prefix_len: Tensor, accepted_path: Tensor, num_accepted: Tensor,
    active: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    num_tokens = accepted_path.shape[0] * (accepted_path.shape[1] + 1)
    features = accepted_path.new_empty((num_tokens, len(hidden) * hidden[0].shape[1]), dtype=hidden[0].dtype)
    return features, accepted_path.new_empty((num_tokens,)), accepted_path.new_empty((num_tokens,))


@native.fake
def context_append_fake(
    keys: Tensor, values: Tensor, kv: Tensor, key_norm: Tensor, eps: float, cos_sin: Tensor, stream: Tensor,
    position: Tensor,
) -> None:  # fmt: skip
    return None


@native.fake
def block_attn_fake(
    qkv: Tensor, query_norm: Tensor, key_norm: Tensor, eps: float, cos_sin: Tensor, keys: Tensor, values: Tensor,
    layer: int, stream: Tensor, prefix_len: Tensor, scale: float, window: int, causal: bool,
) -> Tensor:  # fmt: skip
    num_kv_heads, dim = keys.shape[3:]
    return qkv.new_empty((qkv.shape[0], qkv.shape[1], qkv.shape[2] - 2 * num_kv_heads * dim))
