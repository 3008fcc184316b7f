"""The drafter's arithmetic over the native operations: context rows of hidden states, and layers over a block."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from kdtree_nb.drafters.dflash.config import DFlashConfig
from kdtree_nb.drafters.dflash.weights import Weights
from kdtree_nb.native import ops
from kdtree_nb.native.threads import on_this_thread

MAX_SINGLE_WORK = 1 << 25
"""Multiply-adds up to which attention stays on one thread of a CPU: others would save less than waiting costs."""


class Block(NamedTuple):
    """Where the A blocks of b tokens of a pass stand.

    row:      i64 [A]     their rows in the keys and values
    slot:     i64 [A, b]  their slots there, which are their positions
    position: i32 [A * b]
    masks:    per layer bool [A, 1, g * b, n]: which of the first n slots a query sees, for g query heads at a time
    """

    row: torch.Tensor
    slot: torch.Tensor
    position: torch.Tensor
    masks: list[torch.Tensor]


class Projections:
    """From the target's hidden states to the keys and values of all layers. K heads of length d, L layers."""

    def __init__(self, config: DFlashConfig, weights: Weights) -> None:
        self.config, self.eps = config, config.rms_norm_eps
        self.fc, self.norm = ops.pack_linear(weights["fc.weight"]), weights["hidden_norm.weight"]
        layers = [f"layers.{i}.self_attn." for i in range(config.num_hidden_layers)]
        self.k_proj = ops.pack_linear(torch.cat([weights[f"{name}k_proj.weight"] for name in layers]))
        self.v_proj = ops.pack_linear(torch.cat([weights[f"{name}v_proj.weight"] for name in layers]))
        self.k_norm = torch.stack([weights[f"{name}k_norm.weight"] for name in layers]).unsqueeze(1)
        self.one = torch.ones_like(self.k_norm[0, 0])

    def __call__(
        self, hidden: Sequence[torch.Tensor], position: torch.Tensor, cos_sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden: float [T, D] of each target layer; position i32 [T] -> keys and values [T, L, K, d]."""
        c = self.config
        context = ops.rms_norm(ops.linear(torch.cat(list(hidden), 1), self.fc), self.norm, self.eps)
        shape = (len(context), c.num_hidden_layers, c.num_key_value_heads, c.head_dim)
        k = ops.rms_norm(ops.linear(context, self.k_proj).view(-1, c.head_dim), self.one, self.eps)
        k = (k.view(shape) * self.k_norm).view(len(context), -1, c.head_dim)
        return ops.rope(k, cos_sin, position).view(shape), ops.linear(context, self.v_proj).view(shape)


class Layer:
    """Attention over context and block, then SwiGLU; both add their input to their output."""

    def __init__(self, config: DFlashConfig, weights: Weights, index: int) -> None:
        self.config, self.eps = config, config.rms_norm_eps

        def read(name: str) -> torch.Tensor:
            return weights[f"layers.{index}.{name}.weight"]

        self.norm, self.mlp_norm = read("input_layernorm"), read("post_attention_layernorm")
        qkv = [read(f"self_attn.{name}_proj") for name in "qkv"]
        self.qkv, self.o_proj = ops.pack_linear(torch.cat(qkv)), ops.pack_linear(read("self_attn.o_proj"))
        heads = config.num_attention_heads, config.num_key_value_heads
        norms = [read(f"self_attn.{name}_norm").expand(n, -1) for name, n in zip("qk", heads, strict=True)]
        self.qk_norm = torch.cat(norms)
        self.one = torch.ones_like(self.qk_norm[0])
        self.gate_up = ops.pack_linear(torch.cat([read("mlp.gate_proj"), read("mlp.up_proj")]))
        self.down = ops.pack_linear(read("mlp.down_proj"))

    def __call__(
        self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, cos_sin: torch.Tensor, block: Block,
        mask: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """x [A * b, D] -> the same. keys and values [A, n, K, d] hold the context, and receive the block's own."""
        c = self.config
        H, K, d = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        A, b = block.slot.shape
        qkv = ops.linear(ops.rms_norm(x, self.norm, self.eps), self.qkv).view(A * b, H + 2 * K, d)
        qk = ops.rms_norm(qkv.view(-1, d), self.one, self.eps).view(A * b, H + 2 * K, d)[:, : H + K] * self.qk_norm
        q, k = ops.rope(qk, cos_sin, block.position).split([H, K], 1)
        keys[block.row[:, None], block.slot] = k.reshape(A, b, K, d)
        values[block.row[:, None], block.slot] = qkv[:, H + K :].reshape(A, b, K, d)
        q = q.reshape(A, b, K, H // K, d).permute(0, 2, 3, 1, 4).reshape(A, K, H // K * b, d)
        mixed = attend(q, keys.transpose(1, 2), values.transpose(1, 2), mask)
        mixed = mixed.view(A, K, H // K, b, d).permute(0, 3, 1, 2, 4).reshape(A * b, H * d)
        x = ops.linear(mixed, self.o_proj, x)
        gate_up = ops.linear(ops.rms_norm(x, self.mlp_norm, self.eps), self.gate_up)
        return ops.linear(ops.swiglu(gate_up), self.down, x)


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """q [A, K, r, d], keys and values [A, K, n, d], mask bool [A, 1, r, n] -> [A, K, r, d].

    On a CPU small ones stay on this thread.
    """
    is_small = not q.is_cuda and q.numel() * keys.shape[2] <= MAX_SINGLE_WORK
    with on_this_thread() if is_small else contextlib.nullcontext():
        return scaled_dot_product_attention(q, keys, values, attn_mask=mask)


class PackedDrafter:
    """All weights, packed for one device and dtype."""

    def __init__(self, config: DFlashConfig, weights: Weights, device: torch.device, dtype: torch.dtype) -> None:
        moved = {name: value.to(device, dtype) for name, value in weights.items()}
        self.projections = Projections(config, moved)
        self.layers = [Layer(config, moved, i) for i in range(config.num_hidden_layers)]
        self.norm = moved["norm.weight"]


def visible(config: DFlashConfig, prefix_len: torch.Tensor, block_size: int, num_slots: int) -> list[torch.Tensor]:
    """The masks of a Block behind prefix_len i32 [A] slots of context; layers that are alike share one tensor."""
    first = prefix_len[:, None, None]
    query = first + torch.arange(block_size, dtype=torch.int32, device=first.device)[:, None]
    slot = torch.arange(num_slots, dtype=torch.int32, device=first.device)
    masks: dict[tuple[int | None, bool], torch.Tensor] = {}
    for window, causal in zip(config.windows, config.causal, strict=True):
        if (window, causal) in masks:
            continue
        seen = slot <= query if causal else (slot < first + block_size).expand(-1, block_size, -1)
        if window is not None:
            seen = seen & (query - slot < window) & (slot - query < window)
        wide = seen.unsqueeze(1).expand(-1, config.num_groups, -1, -1)
        masks[window, causal] = wide.reshape(len(prefix_len), 1, -1, num_slots)
    return [masks[kind] for kind in zip(config.windows, config.causal, strict=True)]
