"""The smallest forms of every CUDA kernel, as arrays of numpy: what compute-sanitizer looks at. CASES has an entry for
each process of sanitize.py: its name, operation or operation:variant, and a function of the library that makes forms.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from sanitize_experts import EXPERT_CASES
from sanitize_forms import (
    BF16,
    DTYPE_NAME,
    F32,
    FLOAT,
    INT,
    LONG,
    Case,
    Forms,
    Out,
    count,
    of_dtypes,
    of_one,
    out,
    packed_int4,
    packed_shape,
    real,
    rng,
)

# --- rows ----------------------------------------------------------------------------------------------------------


def embed(t: int) -> dict[str, Any]:
    token = np.array([6, 0, 3], LONG)
    return {"weight": real(7, 21, dtype=t), "token": token, "out": out(3, 21, dtype=t), "num_rows": 3,
            "vocab_size": 7, "dim": 21, "num_rows_device": count(3)}  # fmt: skip


def rms_norm(t: int) -> dict[str, Any]:
    return {"x": real(3, 37, dtype=t), "weight": real(37, dtype=t), "out": out(3, 37, dtype=t), "num_rows": 3,
            "dim": 37, "x_stride": 37, "eps": 1e-6, "num_rows_device": count(3)}  # fmt: skip


def rope(t: int) -> dict[str, Any]:
    return {"x": real(3, 2, 6, dtype=t), "cos_sin": real(9, 6, dtype=F32), "position": np.array([0, 8, 4], INT),
            "out": out(3, 2, 6, dtype=t), "num_rows": 3, "num_heads": 2, "dim": 6, "num_positions": 9,
            "x_row_stride": 12, "x_head_stride": 6}  # fmt: skip


def swiglu(t: int) -> dict[str, Any]:
    return {"gate_up": real(3, 42, dtype=t), "out": out(3, 21, dtype=t), "num_rows": 3, "dim": 21}


def residual_add(t: int) -> dict[str, Any]:
    return {"x": real(3, 21, dtype=t), "y": real(3, 21, dtype=t), "out": out(3, 21, dtype=t), "num_rows": 3, "dim": 21}


def add_partials(t: int) -> dict[str, Any]:
    return {"partials": real(4, 3, 21, dtype=F32), "residual": real(3, 21, dtype=t), "out": out(3, 21, dtype=t),
            "num_partials": 4, "num_rows": 3, "dim": 21}  # fmt: skip


def argmax() -> dict[str, Any]:
    return {"logits": real(3, 1003, dtype=F32), "token": Out((3,), LONG), "num_rows": 3, "vocab_size": 1003}


def sample() -> dict[str, Any]:
    """A stream of argmax, one of all tokens, one of top-k and top-p."""
    return {"logits": real(4, 1003, dtype=F32), "stream": np.array([0, 1, 2, 2], INT),
            "position": np.array([3, 0, 9, 10], INT), "temperature": np.array([0, 1, 0.7], FLOAT),
            "top_k": np.array([0, 0, 33], INT), "top_p": np.array([1, 1, 0.9], FLOAT),
            "seed": np.array([1, 2, 3], LONG), "token": Out((4,), LONG), "num_rows": 4, "vocab_size": 1003,
            "num_streams": 3}  # fmt: skip


def sample_among() -> dict[str, Any]:
    """A stream of argmax, one of all words, one of top-k and top-p."""
    words = np.sort(rng.integers(-(2**62), 2**61, (4, 700)))
    fields = {name: value for name, value in sample().items() if name not in ("logits", "token")}
    largest = np.full(4, 3.0, FLOAT)
    return {**fields, "words": words, "largest": largest, "word": Out((4,), LONG), "num_words": 700}


def draft_topk_merge() -> dict[str, Any]:
    """Two ranks with 5 candidates each, whose words fall, and four segments of largest 1 and sum 2."""
    words = -np.sort(-rng.integers(-(2**62), 2**61, (2, 3, 9)))
    words[..., 5:] = 0x3F800000 << 32 | 0x40000000
    return {"words": words, "log_probs": Out((3, 5), FLOAT), "token_ids": Out((3, 5), LONG), "num_partials": 2,
            "num_rows": 3, "num_candidates": 5}  # fmt: skip


# --- linear --------------------------------------------------------------------------------------------------------


def pack_linear(t: int) -> dict[str, Any]:
    packed = out(*packed_shape(2, 20, 40), dtype=t)
    return {"weight": real(2, 20, 40, dtype=t), "packed": packed, "num_groups": 2, "num_out": 20, "num_in": 40}


def linear(rows: int, num_out: int, num_in: int, t: int) -> dict[str, Any]:
    return {"x": real(rows, 1, num_in, dtype=t), "packed": real(*packed_shape(1, num_out, num_in), dtype=t),
            "residual": real(rows, 1, num_out, dtype=t), "out": out(rows, 1, num_out, dtype=t), "num_rows": rows,
            "num_groups": 1, "num_out": num_out, "num_in": num_in, "x_row_stride": num_in, "x_group_stride": num_in,
            "dtype": t, "out_dtype": t}  # fmt: skip


def linear_shapes(t: int) -> Forms:
    """Every tile shape, long enough in K to wrap around its stages; and the shape that linear_cuda chooses itself."""

    def make(lib: ctypes.CDLL) -> list[Case]:
        shapes = [None, *range(lib.kd_num_shapes(t))]
        return [Case("linear", f"{DTYPE_NAME[t]} shape {shape}", linear(5, 40, 1056, t), shape) for shape in shapes]

    return make


def pack_int4() -> dict[str, Any]:
    words, scale = rng.integers(-(2**31), 2**31, (2, 70, 16)).astype(INT), real(2, 70, 2, dtype=BF16)
    return {"weight": words, "scale": scale, "packed": Out((2, 2, 4, 4, 288), np.uint8), "num_groups": 2,
            "num_out": 70, "num_in": 128, "group_size": 64}  # fmt: skip


def linear_int4(lib: ctypes.CDLL) -> list[Case]:
    """Every tile shape for INT4 weights, long enough in K to wrap around its stages; and the shape that is chosen."""
    cases = []
    for shape in (None, *range(lib.kd_num_int4_shapes(0))):
        fields = {**linear(5, 72, 2144, BF16), "packed": packed_int4(1, 72, 2144), "int4": True}
        cases.append(Case("linear", f"INT4 shape {shape}", fields, shape))
    return cases


def dequantize_int4(t: int) -> dict[str, Any]:
    words = rng.integers(-(2**31), 2**31, (3, 20, 12)).astype(INT)
    return {"weight": words, "scale": real(3, 20, 3, dtype=t), "packed": out(*packed_shape(3, 20, 96), dtype=t),
            "group_id": np.array([2, 0, 1, 1], INT), "num_ids": 4, "num_groups": 3, "num_out": 20, "num_in": 96,
            "group_size": 32, "out_dtype": t, "num_rows_device": count(2), "ids_per_row": 2}  # fmt: skip


# --- cache and attention -------------------------------------------------------------------------------------------


def cache_append(t: int) -> dict[str, Any]:
    return {"cache": real(2, 5, 9, dtype=t), "latent": real(3, 6, dtype=t), "k_rope": real(3, 3, dtype=t),
            "stream": np.array([0, 1, 1], INT), "slot": np.array([4, 0, 3], INT), "num_rows": 3, "num_streams": 2,
            "num_slots": 5, "latent_dim": 6, "rope_dim": 3}  # fmt: skip


def latent_append(t: int) -> dict[str, Any]:
    """Elements one by one: no length is a multiple of 8."""
    return {"q_kv": real(3, 21 + 37 + 6, dtype=t), "q_norm": real(21, dtype=t), "kv_norm": real(37, dtype=t),
            "cos_sin": real(9, 6, dtype=F32), "position": np.array([0, 8, 4], INT), "q": out(3, 21, dtype=t),
            "cache": real(2, 5, 43, dtype=t), "stream": np.array([0, 1, 1], INT), "slot": np.array([4, 0, 3], INT),
            "num_rows": 3, "query_dim": 21, "latent_dim": 37, "rope_dim": 6, "num_positions": 9, "num_streams": 2,
            "num_slots": 5, "q_kv_stride": 64, "eps": 1e-6, "num_rows_device": count(3)}  # fmt: skip


def whole_chunks(t: int) -> dict[str, Any]:
    """Of 8 elements, in more than one warp, and the weights read early."""
    sizes = {"query_dim": 1536, "latent_dim": 512, "rope_dim": 64, "q_kv_stride": 2112}
    arrays = {"q_kv": real(3, 2112, dtype=t), "q_norm": real(1536, dtype=t), "kv_norm": real(512, dtype=t),
              "cos_sin": real(9, 64, dtype=F32), "cache": real(2, 5, 576, dtype=t),
              "q": out(3, 1536, dtype=t)}  # fmt: skip
    return {**latent_append(t), **arrays, **sizes, "weights_settled": True}


def absorb_query(t: int) -> dict[str, Any]:
    """Of few rows: one launch."""
    return {"q": real(3, 2 * (40 + 6), dtype=t), "packed": real(*packed_shape(2, 20, 40), dtype=t),
            "cos_sin": real(9, 6, dtype=F32), "position": np.array([0, 8, 4], INT), "q_latent": out(3, 2, 20, dtype=t),
            "q_rope": out(3, 2, 6, dtype=t), "num_rows": 3, "num_heads": 2, "latent_dim": 20, "nope_dim": 40,
            "rope_dim": 6, "num_positions": 9, "q_stride": 92, "num_rows_device": count(3)}  # fmt: skip


def aligned_query(t: int) -> dict[str, Any]:
    """Rows in whole chunks of 16 bytes, as shapes without stages want them."""
    arrays = {"q": real(3, 96, dtype=t), "cos_sin": real(9, 8, dtype=F32), "q_rope": out(3, 2, 8, dtype=t)}
    return {**absorb_query(t), **arrays, "rope_dim": 8, "q_stride": 96, "weights_settled": True}


def cache_compact(t: int) -> dict[str, Any]:
    return {"cache": real(2, 2, 12, 9, dtype=t), "prefix_len": np.array([4, 2], INT),
            "accepted_path": np.array([[2, 5, 6], [1, -1, -1]], INT), "num_accepted": np.array([3, 1], INT),
            "num_layers": 2, "num_streams": 2, "num_slots": 12, "width": 9, "max_depth": 3}  # fmt: skip


def attention(heads: int, latent: int, rope: int, nodes: int, prefix: int, t: int) -> dict[str, Any]:
    """Two streams, the second with a prefix of 3; nodes in pairs on a chain."""
    parent = np.array([-1, *(max(0, i - 2) for i in range(1, nodes))], INT)
    depth = np.zeros(nodes, INT)
    for i in range(1, nodes):
        depth[i] = depth[parent[i]] + 1
    rows, slots = 2 * nodes, prefix + nodes
    return {"q_latent": real(rows, heads, latent, dtype=t), "q_rope": real(rows, heads, rope, dtype=t),
            "cache": real(2, slots, latent + rope, dtype=t), "stream": np.repeat(np.arange(2, dtype=INT), nodes),
            "node": np.tile(np.arange(nodes, dtype=INT), 2), "parent": np.tile(parent, (2, 1)),
            "depth": np.tile(depth, (2, 1)), "prefix_len": np.array([prefix, 3], INT),
            "out": out(rows, heads, latent, dtype=t), "num_rows": rows, "num_heads": heads, "latent_dim": latent,
            "rope_dim": rope, "num_streams": 2, "num_slots": slots, "num_tree_slots": nodes,
            "scale": (latent + rope) ** -0.5, "dtype": t}  # fmt: skip


def attention_forms(t: int, *sizes: tuple[int, int, int, int, int]) -> Forms:
    """Each (heads, latent, rope, nodes, prefix)."""
    return lambda lib: [
        Case("verify_attn", f"{DTYPE_NAME[t]} {'x'.join(map(str, size))}", attention(*size, t)) for size in sizes
    ]


def attention_alone(heads: int, latent: int, rope: int, nodes: int, prefix: int, t: int) -> dict[str, Any]:
    """One stream, and as many rows again that are not in use, whose outputs are left as they are."""
    fields = attention(heads, latent, rope, nodes, prefix, t)
    trees = {name: fields[name][:1] for name in ("parent", "depth", "prefix_len", "cache")}
    rows = {"stream": np.repeat(np.array([0, -1], INT), nodes), "node": np.repeat(np.array([0, -1], INT), nodes)}
    rows["node"][:nodes] = np.arange(nodes, dtype=INT)
    return fields | trees | rows | {"num_streams": 1, "num_rows_device": np.array([nodes], INT),
                                    "out": real(2 * nodes, heads, latent, dtype=t)}  # fmt: skip


def attention_alone_forms(t: int, *sizes: tuple[int, int, int, int, int]) -> Forms:
    """Each (heads, latent, rope, nodes, prefix)."""
    return lambda lib: [
        Case("verify_attn", f"{DTYPE_NAME[t]} alone {'x'.join(map(str, size))}", attention_alone(*size, t))
        for size in sizes
    ]


# --- block drafters ------------------------------------------------------------------------------------------------


def context_append(t: int) -> dict[str, Any]:
    """Three tokens, of which one is none."""
    return {"kv": real(3, 2, 2, 3, 6, dtype=t), "key_norm": real(2, 6, dtype=t), "cos_sin": real(9, 6, dtype=F32),
            "stream": np.array([0, 1, 1], INT), "position": np.array([8, -1, 0], INT),
            "keys": real(2, 9, 2, 3, 6, dtype=t), "values": real(2, 9, 2, 3, 6, dtype=t), "num_rows": 3,
            "num_layers": 2, "num_heads": 3, "dim": 6, "num_streams": 2, "num_slots": 9, "num_positions": 9,
            "eps": 1e-6}  # fmt: skip


def block_attn(t: int, dim: int, size: int, prefix: int, window: int = 0, causal: bool = False) -> dict[str, Any]:
    """Two blocks of `size` tokens, of four heads to two keys, behind `prefix` and 3 positions."""
    slots = prefix + 1
    return {"qkv": real(2, size, 8, dim, dtype=t), "query_norm": real(dim, dtype=t), "key_norm": real(dim, dtype=t),
            "cos_sin": real(slots + size, dim, dtype=F32), "keys": real(2, slots, 2, 2, dim, dtype=t),
            "values": real(2, slots, 2, 2, dim, dtype=t), "stream": np.array([1, 0], INT),
            "prefix_len": np.array([prefix, 3], INT), "out": out(2, size, 4, dim, dtype=t), "num_blocks": 2,
            "block_size": size, "num_heads": 4, "num_kv_heads": 2, "dim": dim, "num_streams": 2, "num_slots": slots,
            "num_layers": 2, "layer": 1, "num_positions": slots + size, "window": window, "eps": 1e-6,
            "scale": dim**-0.5, "causal": causal, "dtype": t}  # fmt: skip


def block_attn_forms(t: int, *forms: tuple[Any, ...]) -> Forms:
    """Each (head length, tokens, prefix, window, causal)."""
    return lambda lib: [
        Case("block_attn", f"{DTYPE_NAME[t]} {'x'.join(map(str, form))}", block_attn(t, *form)) for form in forms
    ]


BLOCK_FORMS = ((40, 16, 37), (20, 3, 37, 7, True), (128, 5, 1040), (136, 2, 20, 30))
"""All head lengths that have a kernel of their own; the third wraps around the 64 warps of a cluster."""


def accepted_features(t: int, dim: int = 21) -> dict[str, Any]:
    """Eight layers; the root and two nodes of one stream, and a stream that is not active."""
    hidden = {f"hidden_{layer}": real(4, dim, dtype=t) for layer in range(8)}
    return {**hidden, "first_row": np.array([0, 3], INT), "prefix_len": np.array([5, 7], INT),
            "accepted_path": np.array([[1, 3, -1], [-1, -1, -1]], INT), "num_accepted": np.array([2, 0], INT),
            "active": np.array([1, 0], INT), "features": out(2, 4, 8, dim, dtype=t), "stream": Out((2, 4), INT),
            "position": Out((2, 4), INT), "num_layers": 8, "num_rows": 4, "num_streams": 2, "max_depth": 3,
            "dim": dim}  # fmt: skip


# --- trees ---------------------------------------------------------------------------------------------------------


def draft_topk(t: int) -> dict[str, Any]:
    return {"logits": real(2, 1003, dtype=t), "log_probs": Out((2, 33), FLOAT), "token_ids": Out((2, 33), LONG),
            "num_rows": 2, "vocab_size": 1003, "num_candidates": 33}  # fmt: skip


def draft_topk_share(t: int) -> dict[str, Any]:
    """The second of two ranks of 1003 tokens."""
    return {"logits": real(2, 491, dtype=t), "words": Out((2, 33 + 4), LONG), "num_rows": 2, "vocab_size": 491,
            "num_candidates": 33, "whole_vocab": 1003, "first_segment": 4, "num_segments": 4}  # fmt: skip


def tree_build(budget: int, width: int) -> dict[str, Any]:
    """Two streams of depth 4; steps of quarters, so that costs are often equal."""
    log_probs = -np.sort(rng.integers(1, 40, (2, 4, width)) * FLOAT(0.25), axis=-1).astype(FLOAT)
    slots = budget + 1
    return {"log_probs": log_probs, "token_ids": np.tile(np.arange(width, dtype=LONG), (2, 4, 1)),
            "bonus": np.array([0, 5], LONG), "budget": np.array([budget, budget // 2], INT),
            "token": Out((2, slots), LONG), "parent": Out((2, slots), INT), "depth": Out((2, slots), INT),
            "log_prob": Out((2, slots), np.float64), "ancestor_bits": Out((2, slots, -(-slots // 64)), LONG),
            "num_nodes": Out((2,), INT), "status": Out((2,), INT), "num_streams": 2, "max_depth": 4,
            "num_candidates": width, "max_budget": budget}  # fmt: skip


def tree_build_forms(*budgets: int) -> Forms:
    """Budgets of each way to grow a tree."""
    return lambda lib: [Case("tree_build", f"budget {b}", tree_build(b, min(b, 300))) for b in budgets]


def tree_rows() -> dict[str, Any]:
    capacity = 2 * 4
    rows = {f"row_{name}": Out((capacity,), INT) for name in ("stream", "node", "position", "slot")}
    return {"token": np.arange(8, dtype=LONG).reshape(2, 4), "depth": np.array([[0, 1, 1, 2], [0, 1, -1, -1]], INT),
            "num_nodes": np.array([4, 2], INT), "prefix_len": np.array([5, 0], INT), **rows,
            "row_token": Out((capacity,), LONG), "num_streams": 2, "num_tree_slots": 4, "row_begin": Out((2,), INT),
            "num_rows_device": Out((1,), INT)}  # fmt: skip


def tree_accept() -> dict[str, Any]:
    return {"token": np.array([[9, 4, 5, 6], [9, 4, -1, -1]], LONG),
            "parent": np.array([[-1, 0, 0, 1], [-1, 0, -1, -1]], INT), "num_nodes": np.array([4, 2], INT),
            "target_token": np.array([[4, 6, 0, 8], [7, 0, 0, 0]], LONG),
            "accepted_path": Out((2, 3), INT), "num_accepted": Out((2,), INT), "next_token": Out((2,), LONG),
            "num_streams": 2, "num_tree_slots": 4, "max_depth": 3}  # fmt: skip


def step_commit() -> dict[str, Any]:
    ring = np.full((2, 4 + 1 + 3, 2), -1, LONG)
    return {"accepted_path": np.array([[1, 3, -1], [-1, -1, -1]], INT), "num_accepted": np.array([2, 0], INT),
            "num_nodes": np.array([4, 2], INT), "target_token": np.array([4, 6, 0, 8, 7, 0], LONG),
            "row_begin": np.array([0, 4], INT), "is_stop": np.zeros(10, np.uint8), "prefix_len": np.array([5, 1], INT),
            "bonus": np.array([9, 9], LONG), "remaining": np.array([9, 1], INT), "active": np.array([1, 1], INT),
            "text": np.zeros((2, 16), LONG), "ring": ring, "step": np.array([3], LONG), "num_streams": 2,
            "max_depth": 3, "num_rows": 6, "vocab_size": 10, "num_text_slots": 16, "ring_size": 2}  # fmt: skip


CASES: dict[str, Forms] = {
    **EXPERT_CASES,
    **{f.__name__: of_dtypes(f.__name__, f) for f in (embed, rms_norm, rope, swiglu, residual_add, add_partials)},
    "pack_linear": of_dtypes("pack_linear", pack_linear),
    "dequantize_int4": of_dtypes("dequantize_int4", dequantize_int4),
    **{f.__name__: of_dtypes(f.__name__, f) for f in (cache_append, cache_compact, draft_topk)},
    "absorb_query": of_dtypes("absorb_query", absorb_query),
    "absorb_query:whole chunks": of_dtypes("absorb_query", aligned_query),
    "latent_append": of_dtypes("latent_append", latent_append),
    "latent_append:whole chunks": of_dtypes("latent_append", whole_chunks),
    **{f.__name__: of_one(f.__name__, f) for f in (argmax, sample, sample_among, draft_topk_merge)},
    **{f.__name__: of_one(f.__name__, f, "integers") for f in (tree_rows, tree_accept, step_commit)},
    "draft_topk:share": of_dtypes("draft_topk", draft_topk_share),
    "linear:F32": linear_shapes(F32),
    "linear:BF16": linear_shapes(BF16),
    "linear:INT4": linear_int4,
    "pack_int4": of_one("pack_int4", pack_int4, "integers"),
    "context_append": of_dtypes("context_append", context_append),
    "accepted_features": of_dtypes("accepted_features", accepted_features),
    "accepted_features:whole chunks": of_dtypes("accepted_features", lambda t: accepted_features(t, 2048)),
    "block_attn:F32": block_attn_forms(F32, *BLOCK_FORMS),
    "block_attn:BF16": block_attn_forms(BF16, *BLOCK_FORMS, (24, 2, 5)),
    "verify_attn:F32": attention_forms(F32, (4, 64, 16, 3, 37), (3, 48, 12, 3, 37)),
    "verify_attn:BF16": attention_forms(BF16, (4, 64, 16, 3, 37), (8, 96, 16, 3, 37), (3, 48, 12, 3, 37)),
    "verify_attn:F32 alone": attention_alone_forms(F32, (4, 64, 16, 3, 37), (3, 48, 12, 4, 131)),
    "verify_attn:BF16 alone": attention_alone_forms(BF16, (8, 96, 16, 3, 37), (3, 48, 12, 4, 131), (4, 64, 16, 7, 300)),
    "verify_attn:BF16 latent 512 alone": attention_alone_forms(BF16, (8, 512, 64, 3, 0), (8, 512, 64, 4, 205)),
    "verify_attn:BF16 latent 512": attention_forms(
        BF16, (8, 512, 64, 1, 70), (64, 512, 64, 2, 70), (8, 512, 64, 4, 205)
    ),
    "tree_build:small": tree_build_forms(0, 33, 64),
    "tree_build:large": tree_build_forms(65, 300, 1023),
}
