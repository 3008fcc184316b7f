"""The feed-forward block of a layer: one dense SwiGLU block, or a mixture of experts (MoE)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kdtree_nb.config import ModelConfig
from kdtree_nb.reference.linear import linear
from kdtree_nb.reference.moe_experts import Experts, moe_experts
from kdtree_nb.reference.moe_route import moe_route
from kdtree_nb.reference.precision import Rounding
from kdtree_nb.reference.swiglu import swiglu
from kdtree_nb.reference.weights import Weights


class Dense(NamedTuple):
    """One SwiGLU block of width I for every token."""

    gate_up: np.ndarray  # [2I, D]
    down: np.ndarray  # [D, I]


class Moe(NamedTuple):
    """A router and its experts."""

    router: np.ndarray  # [E, D]
    experts: Experts
    bias: np.ndarray | None = None  # [E], of the choice of experts


def feed_forward_weights(weights: Weights, config: ModelConfig, layer: int) -> Dense | Moe:
    """Read the tensors of one layer's block, gate and up joined."""
    dim, width = config.hidden_size, config.moe_intermediate_size
    if config.is_dense_layer(layer):
        return Dense(*_gated(weights, config.intermediate_size, dim))
    routed = [_gated(weights.at(f"experts.{e}."), width, dim) for e in range(config.n_routed_experts)]
    gate_up, down = (np.stack(tensors) for tensors in zip(*routed, strict=True))
    shared = config.n_shared_experts > 0
    return Moe(
        router=weights.take("gate", config.n_routed_experts, dim),
        bias=weights.take_bias("gate.e_score_correction_bias", config.n_routed_experts)
        if config.use_router_bias
        else None,
        experts=Experts(
            gate_up,
            down,
            *(_gated(weights.at("shared_experts."), config.shared_intermediate_size, dim) if shared else ()),
        ),
    )


def feed_forward(
    x: np.ndarray, weights: Dense | Moe, config: ModelConfig, residual: np.ndarray, rounding: Rounding
) -> np.ndarray:
    """block(x) + residual: x and residual [T, D] -> [T, D]. The router's logits and weights are never rounded."""
    if isinstance(weights, Dense):
        hidden = swiglu(linear(x, weights.gate_up, rounding=rounding), rounding)
        return linear(hidden, weights.down, residual, rounding)
    expert_id, weight = moe_route(
        linear(x, weights.router),
        config.num_experts_per_tok,
        config.scoring_func,
        weights.bias,
        renormalize=config.norm_topk_prob,
        scaling_factor=config.routed_scaling_factor,
        num_groups=config.n_group,
        topk_groups=config.topk_group,
    )
    return moe_experts(x, weights.experts, expert_id, weight, residual, rounding)


def _gated(weights: Weights, width: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    gate, up = weights.take("gate_proj", width, dim), weights.take("up_proj", width, dim)
    return np.concatenate([gate, up]), weights.take("down_proj", dim, width)
