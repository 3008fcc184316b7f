"""The drafter's arithmetic over the native operations: context rows of hidden states, and layers over a block."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kdtree_nb.drafters.dflash.config import DFlashConfig
from kdtree_nb.drafters.dflash.weights import Weights
from kdtree_nb.native import ops


class Contexts(NamedTuple):
    """What is remembered of S streams, L layers, K heads of length d.

    keys, values: float [S, P, L, K, d], by position
    cos_sin:      f32 [Q, d], the angles of positions
    """

    keys: torch.Tensor
    values: torch.Tensor
    cos_sin: torch.Tensor


class Block(NamedTuple):
    """Where the A blocks of b tokens of a pass stand.

    stream:     i32 [A]
    prefix_len: i32 [A]  their first positions
    size:       b
    """

    stream: torch.Tensor
    prefix_len: torch.Tensor
    size: int


class Projections:
    """From the target's hidden states to the keys and values of all layers. K heads of length d, L layers."""

    def __init__(self, config: DFlashConfig, weights: Weights) -> None:
        self.eps = config.rms_norm_eps
        self.fc, self.norm = ops.pack_linear(weights["fc.weight"]), weights["hidden_norm.weight"]
        layers = [f"layers.{i}.self_attn." for i in range(config.num_hidden_layers)]
        self.kv_proj = ops.pack_linear(
            torch.cat([weights[f"{name}{kind}_proj.weight"] for kind in "kv" for name in layers])
        )
        self.k_norm = torch.stack([weights[f"{name}k_norm.weight"] for name in layers])

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        """Hidden states behind n target layers, float [T, nD] -> [T, 2LKd]: keys of all layers, then values.

        The keys have yet to be normalised and turned to their positions: ops.context_append does that.
        """
        context = ops.rms_norm(ops.linear(features, self.fc), self.norm, self.eps)
        return ops.linear(context, self.kv_proj)

    def remember(
        self, features: torch.Tensor, stream: torch.Tensor, position: torch.Tensor, contexts: Contexts
    ) -> None:
        """Add T tokens to the contexts: stream and position i32 [T], where a position of -1 is no token."""
        keys, values, cos_sin = contexts
        ops.context_append(keys, values, self(features), self.k_norm, self.eps, cos_sin, stream, position)


class Layer:
    """Attention over context and block, then SwiGLU; both add their input to their output."""

    def __init__(self, config: DFlashConfig, weights: Weights, index: int) -> None:
        self.index, self.eps, self.scale = index, config.rms_norm_eps, config.head_dim**-0.5
        self.window, self.causal = config.windows[index], config.causal[index]

        def read(name: str) -> torch.Tensor:
            return weights[f"layers.{index}.{name}.weight"]

        self.norm, self.mlp_norm = read("input_layernorm"), read("post_attention_layernorm")
        qkv = [read(f"self_attn.{name}_proj") for name in "qkv"]
        self.qkv, self.o_proj = ops.pack_linear(torch.cat(qkv)), ops.pack_linear(read("self_attn.o_proj"))
        self.q_norm, self.k_norm = read("self_attn.q_norm"), read("self_attn.k_norm")
        self.gate_up = ops.pack_linear(torch.cat([read("mlp.gate_proj"), read("mlp.up_proj")]))
        self.down = ops.pack_linear(read("mlp.down_proj"))

    def __call__(self, x: torch.Tensor, block: Block, contexts: Contexts) -> torch.Tensor:
        """x [A * b, D] -> the same."""
        keys, values, cos_sin = contexts
        qkv = ops.linear(ops.rms_norm(x, self.norm, self.eps), self.qkv)
        mixed = ops.block_attn(
            qkv.view(-1, block.size, qkv.shape[1]), self.q_norm, self.k_norm, self.eps, cos_sin, keys, values,
            self.index, block.stream, block.prefix_len, self.scale, self.window, self.causal,
        )  # fmt: skip
        x = ops.linear(mixed.flatten(0, 1), self.o_proj, x)
        gate_up = ops.linear(ops.rms_norm(x, self.mlp_norm, self.eps), self.gate_up)
        return ops.linear(ops.swiglu(gate_up), self.down, x)


class PackedDrafter:
    """All weights, packed for one device and dtype."""

    def __init__(self, config: DFlashConfig, weights: Weights, device: torch.device, dtype: torch.dtype) -> None:
        moved = {name: value.to(device, dtype) for name, value in weights.items()}
        self.projections = Projections(config, moved)
        self.layers = [Layer(config, moved, i) for i in range(config.num_hidden_layers)]
        self.norm = moved["norm.weight"]
