"""`tiny` in plain PyTorch, for training: an MLA + MoE decoder over bytes, every expert computed and then gated.

Slow and simple on purpose: no cache, no kernels, naive (not absorbed) attention. The engine's own model is
`kdtree_nb.model`; both read the same tensors, by the names of DeepSeek checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from kdtree_nb.config import ModelConfig

TINY_CONFIG = ModelConfig(
    vocab_size=256,
    hidden_size=256,
    num_hidden_layers=4,
    first_k_dense_replace=1,
    num_attention_heads=4,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    intermediate_size=512,
    moe_intermediate_size=96,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_shared_experts=1,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    max_position_embeddings=4096,
    norm_topk_prob=True,
    eos_token_ids=(0,),
)


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
        wide = x.to(_wide(x.dtype))
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


def rope_table(num_positions: int, dim: int, theta: float, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) [positions, 1, dim / 2] of positions 0, 1, …, on the device of `like`, from float64 angles."""
    frequency = theta ** (-torch.arange(0, dim, 2, device=like.device, dtype=torch.float64) / dim)
    angle = torch.arange(num_positions, device=like.device, dtype=torch.float64)[:, None, None] * frequency
    return angle.cos().to(_wide(like.dtype)), angle.sin().to(_wide(like.dtype))


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [batch, positions, heads, dim] in NeoX order: element i with element i + dim / 2."""
    a, b = x.to(cos.dtype).chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """At least float32."""
    return torch.promote_types(dtype, torch.float32)


class Attention(nn.Module):
    """Causal multi-head latent attention in its naive form: keys and values are expanded from the latent."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        c = self.config = config
        self.q_proj = Linear(c.hidden_size, c.num_attention_heads * c.q_head_dim)
        self.kv_a_proj_with_mqa = Linear(c.hidden_size, c.latent_dim)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, c.rms_norm_eps)
        self.kv_b_proj = Linear(c.kv_lora_rank, c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim))
        self.o_proj = Linear(c.num_attention_heads * c.v_head_dim, c.hidden_size, zero=True)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [batch, positions, hidden] -> the same shape; cos and sin from `rope_table`."""
        c, heads = self.config, self.config.num_attention_heads
        q_nope, q_rope = self.q_proj(x).unflatten(-1, (heads, -1)).split([c.qk_nope_head_dim, c.qk_rope_head_dim], -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (heads, -1))
        k_nope, v = expanded.split([c.qk_nope_head_dim, c.v_head_dim], -1)
        k_rope = rope(k_rope[:, :, None], cos, sin).expand(-1, -1, heads, -1)
        q = torch.cat([q_nope, rope(q_rope, cos, sin)], -1)
        k = torch.cat([k_nope, k_rope], -1)
        v = functional.pad(v, (0, c.q_head_dim - c.v_head_dim))  # fused attention wants equal lengths
        mixed = functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        return self.o_proj(mixed[..., : c.v_head_dim].transpose(1, 2).flatten(2))


class DenseMLP(nn.Module):
    """SwiGLU block."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = Linear(hidden, width), Linear(hidden, width)
        self.down_proj = Linear(width, hidden, zero=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden] -> the same shape."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class MoE(nn.Module):
    """Softmax top-k router over experts, plus a shared expert. All experts run as one wide SwiGLU with gates."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        c = self.config = config
        shape = (c.n_routed_experts, c.moe_intermediate_size, c.hidden_size)
        self.gate = Linear(c.hidden_size, c.n_routed_experts)
        nn.init.normal_(self.gate.weight, std=0.02)
        self.gate_proj, self.up_proj = (nn.Parameter(torch.randn(shape) * c.hidden_size**-0.5) for _ in range(2))
        self.down_proj = nn.Parameter(torch.zeros(shape[0], shape[2], shape[1]))
        self.shared_experts = DenseMLP(c.hidden_size, c.shared_intermediate_size)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [batch, positions, hidden] -> (the same shape, share of choices [experts], balance loss [])."""
        c = self.config
        wide = x.to(_wide(x.dtype))
        probability = self.gate(wide).softmax(-1)
        chosen = probability * _is_in_top(probability.detach(), c.num_experts_per_tok)
        scale = chosen.sum(-1, keepdim=True) if c.norm_topk_prob else 1.0
        gates = chosen / scale * c.routed_scaling_factor
        hidden = functional.silu(functional.linear(x, self.gate_proj.flatten(0, 1).to(x.dtype)))
        hidden = hidden * functional.linear(x, self.up_proj.flatten(0, 1).to(x.dtype))
        hidden = (hidden.unflatten(-1, (c.n_routed_experts, -1)) * gates[..., None].to(x.dtype)).flatten(-2)
        mixed = functional.linear(hidden, self.down_proj.transpose(0, 1).flatten(1).to(x.dtype))
        load = (gates > 0).to(wide.dtype).mean((0, 1)) / c.num_experts_per_tok
        balance = c.n_routed_experts * (load * probability.mean((0, 1))).sum()
        return mixed + self.shared_experts(x), load, balance


def _is_in_top(values: torch.Tensor, k: int) -> torch.Tensor:
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
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out = self.mlp(self.post_attention_layernorm(x))
        mixed, load, balance = out if isinstance(out, tuple) else (out, None, None)
        return x + mixed, load, balance


class TinyModel(nn.Module):
    """The whole decoder. Parameters are float32; `dtype` in `forward` is that of the activations."""

    def __init__(self, config: ModelConfig = TINY_CONFIG) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.05)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)

    def forward(
        self, tokens: torch.Tensor, dtype: torch.dtype = torch.float32, layers: Sequence[Callable] | None = None
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """tokens int64 [batch, positions] -> (logits [batch, positions, vocab], loads, balance losses of MoE layers).

        `layers` are stand-ins for `self.layers`, such as their compiled forms.
        """
        x = self.embed_tokens(tokens).to(dtype)
        cos, sin = rope_table(tokens.shape[1], self.config.qk_rope_head_dim, self.config.rope_theta, like=x)
        loads, balances = [], []
        for layer in self.layers if layers is None else layers:
            x, load, balance = layer(x, cos, sin)
            if load is not None:
                loads.append(load)
                balances.append(balance)
        return self.lm_head(self.norm(x)), loads, balances

    @torch.no_grad()
    def greedy(self, tokens: list[int], num_tokens: int, dtype: torch.dtype = torch.float32) -> list[int]:
        """The `num_tokens` most likely next tokens, one after the other, by recomputing everything each time."""
        ids = torch.tensor([tokens], device=self.lm_head.weight.device)
        for _ in range(num_tokens):
            ids = torch.cat([ids, self(ids, dtype)[0][:, -1:].argmax(-1)], 1)
        return ids[0, len(tokens) :].tolist()


def export_tensors(model: TinyModel) -> dict[str, np.ndarray]:
    """Weights as float32 arrays by DeepSeek checkpoint names (one tensor per expert and matrix)."""
    tensors = {}
    for name, value in model.state_dict().items():
        array, full = value.detach().float().cpu().numpy(), name if name.startswith("lm_head") else f"model.{name}"
        stem, _, part = full.rpartition(".")
        if array.ndim == 3:
            tensors |= {f"{stem}.experts.{e}.{part}.weight": array[e] for e in range(len(array))}
        else:
            tensors[full] = array
    return tensors


def import_tensors(model: TinyModel, tensors: dict[str, np.ndarray]) -> None:
    """The inverse of `export_tensors`. KeyError when a tensor is missing."""
    state = {}
    for name, value in model.state_dict().items():
        full = name if name.startswith("lm_head") else f"model.{name}"
        stem, _, part = full.rpartition(".")
        experts = [f"{stem}.experts.{e}.{part}.weight" for e in range(len(value))] if value.ndim == 3 else []
        array = np.stack([tensors[expert] for expert in experts]) if experts else tensors[full]
        state[name] = torch.from_numpy(np.array(array, np.float32))
    model.load_state_dict(state)
