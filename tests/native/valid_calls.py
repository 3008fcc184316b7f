"""One small valid call of every native operator on a CPU: its arguments by the names of the schema."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kdtree_nb import ops
from kdtree_nb.tree import DraftTree

T, S, D = 5, 2, 12
"""Rows, streams, width."""

Arguments = dict[str, Any]


class Inputs:
    """Random inputs in one float type; the same for the same seed."""

    def __init__(self, dtype: torch.dtype, seed: int = 20261) -> None:
        self.dtype, self.rng = dtype, np.random.default_rng(seed)

    def floats(self, *shape: int) -> torch.Tensor:
        return torch.from_numpy(self.rng.standard_normal(shape)).to(self.dtype)

    def f32(self, *shape: int) -> torch.Tensor:
        return torch.from_numpy(self.rng.standard_normal(shape)).float()

    def ids(self, high: int, *shape: int) -> torch.Tensor:
        return torch.from_numpy(self.rng.integers(0, high, shape))

    def int4(self) -> Arguments:
        words = self.rng.integers(-(2**31), 2**31, (3, 20, 8))
        return {"weight": torch.from_numpy(words).int(), "scale": self.f32(3, 20, 2).bfloat16()}


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def used(num_rows: int = T) -> Arguments:
    return {"num_rows": int32(num_rows)}


def linear(i: Inputs) -> Arguments:
    packed = ops.pack_linear(i.floats(20, 33)).data
    return {"x": i.floats(T, 33), "packed": packed, "num_out": 20, "residual": i.floats(T, 20), "out_f32": False,
            **used(), "settled": False, "whole_in": 0, "first_segment": 0, "num_segments": 0}  # fmt: skip


def linear_share(i: Inputs) -> Arguments:
    """Segments 2 and 3 of 256 inputs."""
    packed = ops.pack_linear(i.floats(20, 64)).data
    return {"x": i.floats(T, 64), "packed": packed, "num_out": 20, "residual": None, "out_f32": True, **used(),
            "settled": False, "whole_in": 256, "first_segment": 2, "num_segments": 2}  # fmt: skip


def linear_int4(i: Inputs) -> Arguments:
    i.dtype = torch.bfloat16
    return linear(i) | {"x": i.floats(T, 64), "packed": ops.pack_int4(**i.int4())[:1].clone()}


def linear_heads(i: Inputs) -> Arguments:
    packed = ops.pack_linear(i.floats(3, 9, 16)).data
    return {"x": i.floats(T, 3, 16), "packed": packed, "num_out": 9, **used(), "settled": True}


def sampling(i: Inputs) -> Arguments:
    return {"stream": int32(0, 0, 1, 1, 1), "position": int32(3, 4, 0, 9, 10), "temperature": torch.tensor([0.7, 0.0]),
            "top_k": int32(3, 0), "top_p": torch.tensor([0.9, 1.0]), "seed": torch.tensor([5, -6])}  # fmt: skip


def moe_experts(i: Inputs) -> Arguments:
    routed = [i.floats(4, 8, 32), i.floats(4, 8, 32), i.floats(4, 32, 8)]
    gate_up, down, shared_gate_up, shared_down, width, shared_width = ops.pack_experts(
        *routed, i.floats(6, 32), i.floats(6, 32), i.floats(32, 6)
    )[:6]
    chosen = torch.tensor([[0, 3], [1, 2], [2, 3], [0, 1], [1, 3]], dtype=torch.int32)
    return {"x": i.floats(T, 32), "gate_up": gate_up, "down": down, "shared_gate_up": shared_gate_up,
            "shared_down": shared_down, "expert_id": chosen, "weight": i.f32(T, 2), "width": width,
            "shared_width": shared_width, "residual": i.floats(T, 32), **used(), "whole_width": 0,
            "whole_shared_width": 0, "first_segment": 0, "num_segments": 0}  # fmt: skip


def verify_attn(i: Inputs) -> Arguments:
    """Stream 0: a root and its child; stream 1: a root, a child and a grandchild."""
    return {"q_latent": i.floats(T, 2, 16), "q_rope": i.floats(T, 2, 8), "cache": i.floats(S, 40, 24),
            "stream": int32(0, 0, 1, 1, 1), "node": int32(0, 1, 0, 1, 2),
            "parent": torch.stack([int32(-1, 0, -1), int32(-1, 0, 1)]),
            "depth": torch.stack([int32(0, 1, -1), int32(0, 1, 2)]), "prefix_len": int32(3, 33), "scale": 0.2,
            **used()}  # fmt: skip


def candidates(i: Inputs) -> Arguments:
    ids = torch.stack([torch.from_numpy(i.rng.permutation(50)[:4]) for _ in range(S * 3)]).view(S, 3, 4)
    log_probs = -torch.from_numpy(np.sort(i.rng.exponential(2.0, (S, 3, 4)))).float()
    return {"log_probs": log_probs, "token_ids": ids, "bonus": torch.tensor([7, 0])}


def tree(i: Inputs) -> DraftTree:
    return ops.tree_build(**candidates(i), budget=int32(6, 3), max_budget=6)


def tree_rows(i: Inputs) -> Arguments:
    built = tree(i)
    return {"token": built.token, "depth": built.depth, "num_nodes": built.num_nodes, "prefix_len": int32(3, 33)}


def tree_accept(i: Inputs) -> Arguments:
    built = tree(i)
    target = built.token[:, 1:2].expand(S, 7).contiguous()
    return {"token": built.token, "parent": built.parent, "num_nodes": built.num_nodes, "target_token": target,
            "max_depth": 3, "row_begin": None}  # fmt: skip


def tree_accept_rows(i: Inputs) -> Arguments:
    return tree_accept(i) | {"target_token": i.ids(50, 11), "row_begin": int32(0, 7)}


def step_commit(i: Inputs) -> Arguments:
    text = torch.full((S, 20), -1)
    text[:, 6] = torch.tensor([7, 8])
    return {"accepted_path": torch.stack([int32(1, 2, -1), int32(2, -1, -1)]), "num_accepted": int32(2, 1),
            "num_nodes": int32(4, 3), "target_token": torch.tensor([11, 12, 13, 14, 21, 5, 23]),
            "row_begin": int32(0, 4), "is_stop": torch.arange(64) == 5, "prefix_len": int32(6, 6),
            "bonus": torch.tensor([7, 8]), "remaining": int32(9, 2), "active": int32(1, 1), "text": text,
            "ring": torch.full((3, 4 + 1 + 3, S), -7), "step": torch.tensor([4])}  # fmt: skip


def compacted(i: Inputs) -> Arguments:
    return {"cache": i.floats(2, S, 40, 6), "prefix_len": int32(3, 30),
            "accepted_path": torch.stack([int32(1, 3, -1), int32(2, -1, -1)]), "num_accepted": int32(2, 1)}  # fmt: skip


def words(i: Inputs) -> torch.Tensor:
    """Of two ranks with half of 64 tokens each."""
    logits = i.f32(S, 3, 64)
    halves = [half.contiguous() for half in logits.split(32, 2)]
    return torch.stack([ops.draft_topk_share(halves[r], 4, 64, ops.Segments(4 * r, 4)) for r in (0, 1)])


def latent_append(i: Inputs) -> Arguments:
    """Query latents of 7, latents of 4, keys of 2."""
    return {"cache": i.floats(S, 9, 6), "q_kv": i.floats(T, 7 + 4 + 2), "q_norm": i.floats(7), "kv_norm": i.floats(4),
            "cos_sin": i.f32(9, 2), "position": i.ids(9, T).int(), "stream": int32(0, 0, 1, 1, 1),
            "slot": int32(0, 8, 3, 4, 5), "eps": 1e-6, **used(), "settled": False}  # fmt: skip


def context_append(i: Inputs) -> Arguments:
    """Four tokens, and one that is none."""
    return {"keys": i.floats(S, 9, 3, 2, 4), "values": i.floats(S, 9, 3, 2, 4), "kv": i.floats(T, 48),
            "key_norm": i.floats(3, 4), "eps": 1e-6, "cos_sin": i.f32(9, 4), "stream": int32(0, 0, 1, 1, 1),
            "position": int32(0, 8, -1, 4, 5)}  # fmt: skip


def accepted_features(i: Inputs) -> Arguments:
    """Of three layers: a root and two accepted nodes of the first stream, a root of the second."""
    return {"hidden": [i.floats(T, D) for _ in range(3)], "first_row": int32(0, 4), "prefix_len": int32(6, 30),
            "accepted_path": torch.stack([int32(1, 3, -1), int32(-1, -1, -1)]), "num_accepted": int32(2, 0),
            "active": int32(1, 1)}  # fmt: skip


def block_attn(i: Inputs) -> Arguments:
    """Three blocks of four tokens, four heads to two keys of length 6."""
    return {"qkv": i.floats(3, 4, 48), "query_norm": i.floats(6), "key_norm": i.floats(6), "eps": 1e-6,
            "cos_sin": i.f32(44, 6), "keys": i.floats(S, 40, 3, 2, 6), "values": i.floats(S, 40, 3, 2, 6), "layer": 1,
            "stream": int32(1, 0, 1), "prefix_len": int32(3, 0, 40), "scale": 0.4, "window": 9,
            "causal": True}  # fmt: skip


def absorb_query(i: Inputs) -> Arguments:
    """3 heads of 16 and 4 columns."""
    packed = ops.pack_linear(i.floats(3, 9, 16)).data
    return {"q": i.floats(T, 3 * (16 + 4)), "packed": packed, "num_heads": 3, "latent_dim": 9, "cos_sin": i.f32(9, 4),
            "position": i.ids(9, T).int(), **used(), "settled": False}  # fmt: skip


CALLS: dict[str, Callable[[Inputs], Arguments]] = {
    "embed": lambda i: {"weight": i.floats(11, D), "token": i.ids(11, T), **used()},
    "rms_norm": lambda i: {"x": i.floats(T, D), "weight": i.floats(D), "eps": 1e-6, **used(), "settled": False},
    "pack_linear": lambda i: {"weight": i.floats(2, 20, 33)},
    "dequantize_int4": lambda i: i.int4() | {"bf16": True, "group_id": torch.stack([int32(0, 2)] * T), **used()},
    "pack_int4": lambda i: i.int4(),
    "linear": linear,
    "linear (a share)": linear_share,
    "linear (INT4)": linear_int4,
    "linear_heads": linear_heads,
    "rope": lambda i: {"x": i.floats(T, 3, 16), "cos_sin": i.f32(9, 16), "position": i.ids(9, T).int(), **used()},
    "swiglu": lambda i: {"gate_up": i.floats(T, 2 * D), **used()},
    "residual_add": lambda i: {"x": i.floats(T, D), "y": i.floats(T, D), **used()},
    "add_partials": lambda i: {"partials": i.f32(4, T, D), "residual": i.floats(T, D),
                               "bf16": i.dtype == torch.bfloat16, **used()},
    "argmax": lambda i: {"logits": i.f32(T, 50), **used()},
    "sample": lambda i: {"logits": i.f32(T, 50), **sampling(i), **used()},
    "sample_among": lambda i: {"words": i.ids(2**62, T, 4), "largest": i.f32(T), **sampling(i), "vocab_size": 200,
                               **used()},
    "moe_route": lambda i: {"logits": i.f32(T, 8), "bias": i.f32(8), "top_k": 3, "scoring": 1, "renormalize": True,
                            "scaling_factor": 2.5, **used(), "num_groups": 4, "topk_groups": 2},
    "moe_experts": moe_experts,
    "cache_append": lambda i: {"cache": i.floats(S, 9, 6), "latent": i.floats(T, 4), "k_rope": i.floats(T, 2),
                               "stream": int32(0, 0, 1, 1, 1), "slot": int32(0, 8, 3, 4, 5), **used()},
    "latent_append": latent_append,
    "absorb_query": absorb_query,
    "cache_compact": compacted,
    "verify_attn": verify_attn,
    "context_append": context_append,
    "block_attn": block_attn,
    "accepted_features": accepted_features,
    "draft_topk": lambda i: {"logits": i.floats(S, 3, 50), "num_candidates": 4},
    "draft_topk_share": lambda i: {"logits": i.floats(S, 3, 32), "num_candidates": 4, "whole_vocab": 64,
                                   "first_segment": 4, "num_segments": 4},
    "draft_topk_merge": lambda i: {"words": words(i), "num_candidates": 4},
    "tree_build": lambda i: candidates(i) | {"budget": int32(6, 3), "max_budget": 6},
    "tree_rows": tree_rows,
    "tree_rows_padded": tree_rows,
    "tree_accept": tree_accept,
    "tree_accept (by rows)": tree_accept_rows,
    "step_commit": step_commit,
}  # fmt: skip
"""By operator, perhaps with a form in brackets."""

PER_ROW = {
    "embed": ("token",), "rms_norm": ("x",), "linear": ("x", "residual"), "linear_heads": ("x",),
    "rope": ("x", "position"), "latent_append": ("q_kv", "position"), "absorb_query": ("q", "position"),
    "swiglu": ("gate_up",), "residual_add": ("x", "y"), "add_partials": ("residual",),
    "argmax": ("logits",), "sample": ("logits", "stream", "position"),
    "sample_among": ("words", "largest", "stream", "position"), "moe_route": ("logits",),
    "moe_experts": ("x", "expert_id", "weight", "residual"), "draft_topk": ("logits",),
    "block_attn": ("qkv", "stream", "prefix_len"), "draft_topk_share": ("logits",),
    "tree_build": ("log_probs", "token_ids", "bonus", "budget"),
    "tree_accept": ("token", "parent"),
}  # fmt: skip
"""Arguments whose first dimension counts what the results' first dimension counts: what is in one row, or stream, of
them changes nothing in the results of the others."""

IN_PLACE = {"cache_append": ("cache",), "latent_append": ("cache",), "cache_compact": ("cache",),
            "context_append": ("keys", "values"),
            "step_commit": ("prefix_len", "bonus", "remaining", "active", "text", "ring", "step")}  # fmt: skip


def operator_of(name: str) -> str:
    """The operator of a name in CALLS."""
    return name.partition(" ")[0]
