"""The layers of the DeepSeek-V3 family in plain PyTorch, for training: every expert computed and then gated.

Slow and simple on purpose: no kernels, naive (not absorbed) attention. The engine's own model is `kdtree_nb.model`;
both read the same tensors, by the names of DeepSeek checkpoints.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from kdtree_nb.config import ModelConfig


class Linear(nn.Linear):
    """y = x Wᵀ, no bias, computed in the dtype of x (the weight stays float32). A zero start when `zero`."""

    def __init__(self, num_in: int, num_out: int, zero: bool = False) -> None:
        super().__init__(num_in, num_out, bias=False)
        nn.init.zeros_(self.weight) if zero else nn.init.normal_(self.weight, std=num_in**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., num_in] -> [..., num_out]."""
        return functional.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] -> the same shape and dtype."""
        wide = x.to(at_least_float32(x.dtype))
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


def rope_table(num_positions: int, dim: int, theta: float, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) [positions, 1, dim / 2] of positions 0, 1, …, on the device of `like`, from float64 angles."""
    frequency = theta ** (-torch.arange(0, dim, 2, device=like.device, dtype=torch.float64) / dim)
    angle = torch.arange(num_positions, device=like.device, dtype=torch.float64)[:, None, None] * frequency
    return angle.cos().to(at_least_float32(like.dtype)), angle.sin().to(at_least_float32(like.dtype))


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [batch, positions, heads, dim] in NeoX order: element i with element i + dim / 2."""
    a, b = x.to(cos.dtype).chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """At least float32."""
    return torch.promote_types(dtype, torch.float32)


class Attention(nn.Module):
    """Causal multi-head latent attention in its naive form: keys and values are expanded from the latent."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        c = self.config = config
        num_rows = c.num_attention_heads * c.q_head_dim
        if c.q_lora_rank is None:
            self.q_proj = Linear(c.hidden_size, num_rows)
        else:
            self.q_a_proj = Linear(c.hidden_size, c.q_lora_rank)
            self.q_a_layernorm = RMSNorm(c.q_lora_rank, c.attention_eps)
            self.q_b_proj = Linear(c.q_lora_rank, num_rows)
        self.kv_a_proj_with_mqa = Linear(c.hidden_size, c.latent_dim)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, c.attention_eps)
        self.kv_b_proj = Linear(c.kv_lora_rank, c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim))
        self.o_proj = Linear(c.num_attention_heads * c.v_head_dim, c.hidden_size, zero=True)

    def project(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """x [batch, positions, hidden] -> q_nope and q_rope [batch, positions, heads, nope | rope], the normed latent
        [batch, positions, kv_lora_rank] and k_rope [batch, positions, rope]; cos and sin from `rope_table`."""
        c = self.config
        q = self.q_proj(x) if c.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q_nope, q_rope = q.unflatten(-1, (c.num_attention_heads, -1)).split(
            [c.qk_nope_head_dim, c.qk_rope_head_dim], -1
        )
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        return q_nope, rope(q_rope, cos, sin), self.kv_a_layernorm(latent), rope(k_rope[:, :, None], cos, sin)[:, :, 0]

    def attend(
        self, q_nope: torch.Tensor, q_rope: torch.Tensor, latent: torch.Tensor, k_rope: torch.Tensor
    ) -> torch.Tensor:
        """What `project` gives of whole texts -> [batch, positions, hidden]."""
        c = self.config
        expanded = self.kv_b_proj(latent).unflatten(-1, (c.num_attention_heads, -1))
        k_nope, v = expanded.split([c.qk_nope_head_dim, c.v_head_dim], -1)
        q = torch.cat([q_nope, q_rope], -1)
        k = torch.cat([k_nope, k_rope[:, :, None].expand(-1, -1, c.num_attention_heads, -1)], -1)
        v = functional.pad(v, (0, c.q_head_dim - c.v_head_dim))  # fused attention wants equal lengths
        mixed = functional.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, scale=c.softmax_scale
        )
        return self.o_proj(mixed[..., : c.v_head_dim].transpose(1, 2).flatten(2))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [batch, positions, hidden] -> the same shape; cos and sin from `rope_table`."""
        return self.attend(*self.project(x, cos, sin))


class DenseMLP(nn.Module):
    """SwiGLU block."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = Linear(hidden, width), Linear(hidden, width)
        self.down_proj = Linear(width, hidden, zero=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden] -> the same shape."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(Linear):
    """Logits of the routed experts, and the bias per expert that takes part in choosing, if the configuration has one.

    Nothing trains the bias by gradients: whoever trains moves it towards an even load.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.hidden_size, config.n_routed_experts)
        nn.init.normal_(self.weight, std=0.02)
        self.config = config
        if config.use_router_bias:
            self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [..., hidden] in at least float32 -> (scores, gates) [..., experts]; gates are zero but for the chosen."""
        c, logits = self.config, self(x)
        scores = logits.sigmoid() if c.scoring_func == "sigmoid" else logits.softmax(-1)
        by = scores.detach()
        chosen = scores * is_in_top(
            by + self.e_score_correction_bias if c.use_router_bias else by, c.num_experts_per_tok
        )
        scale = chosen.sum(-1, keepdim=True) + 1e-20 if c.norm_topk_prob else 1.0
        return scores, chosen / scale * c.routed_scaling_factor


class MoE(nn.Module):
    """Routed experts, plus a shared one. All experts run as one wide SwiGLU with gates."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        c = self.config = config
        if c.n_group != 1 or c.n_shared_experts < 1:
            raise ValueError(f"MoE: expected one group and a shared expert, got {c.n_group} and {c.n_shared_experts}")
        shape = (c.n_routed_experts, c.moe_intermediate_size, c.hidden_size)
        self.gate = Router(c)
        self.gate_proj, self.up_proj = (nn.Parameter(torch.randn(shape) * c.hidden_size**-0.5) for _ in range(2))
        self.down_proj = nn.Parameter(torch.zeros(shape[0], shape[2], shape[1]))
        self.shared_experts = DenseMLP(c.hidden_size, c.shared_intermediate_size)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [batch, positions, hidden] -> (the same shape, share of choices [experts], balance loss [])."""
        c = self.config
        wide = x.to(at_least_float32(x.dtype))
        scores, gates = self.gate.route(wide)
        hidden = functional.silu(functional.linear(x, self.gate_proj.flatten(0, 1).to(x.dtype)))
        hidden = hidden * functional.linear(x, self.up_proj.flatten(0, 1).to(x.dtype))
        hidden = (hidden.unflatten(-1, (c.n_routed_experts, -1)) * gates[..., None].to(x.dtype)).flatten(-2)
        mixed = functional.linear(hidden, self.down_proj.transpose(0, 1).flatten(1).to(x.dtype))
        load = (gates > 0).to(wide.dtype).mean((0, 1)) / c.num_experts_per_tok
        balance = c.n_routed_experts * (load * scores.mean((0, 1))).sum()
        return mixed + self.shared_experts(x), load, balance


def is_in_top(values: torch.Tensor, k: int) -> torch.Tensor:
    """Whether each of values [..., n] is among the k largest of its row; the lower index wins ties."""
    index = torch.arange(values.shape[-1], device=values.device)
    this, other = values[..., :, None], values[..., None, :]
    beaten_by = (other > this) | ((other == this) & (index[None, :] < index[:, None]))
    return beaten_by.sum(-1) < k


class Layer(nn.Module):
    """One decoder layer; every layer returns (x, expert load, balance loss), the last two None in a dense one."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        dense = config.is_dense_layer(index)
        self.mlp = DenseMLP(config.hidden_size, config.intermediate_size) if dense else MoE(config)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """x [batch, positions, hidden]; cos and sin from `rope_table`."""
        return self.feed_forward(x + self.self_attn(self.input_layernorm(x), cos, sin))

    def feed_forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """The half of the layer behind attention."""
        out = self.mlp(self.post_attention_layernorm(x))
        mixed, load, balance = out if isinstance(out, tuple) else (out, None, None)
        return x + mixed, load, balance
