"""The same model in plain eager torch: the baseline that a competent user would write without any kernel of his own.

For one stream, token by token. What eager code can do well is done: fused projections, absorbed MLA, only the chosen
experts are read, residuals are added inside the matmuls, the cache is allocated once, inference mode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from kdtree_nb.config import ModelConfig


class _Attention(NamedTuple):
    norm: Tensor  # [D]
    q_kv_a: Tensor  # [H*(nope+rope) + C+R, D], rows H*nope | H*rope | C | R
    kv_norm: Tensor  # [C]
    w_kc: Tensor  # [H, nope, C]
    w_vc: Tensor  # [H, C, v]
    o_proj_t: Tensor  # [H*v, D]


class _Gated(NamedTuple):
    """One SwiGLU block. gate_up [2I, D], down_t [I, D]."""

    gate_up: Tensor
    down_t: Tensor


class _FeedForward(NamedTuple):
    norm: Tensor  # [D]
    router: Tensor | None  # [E, D], None in a dense layer
    experts: list[_Gated]
    always: _Gated | None  # the shared expert, or the dense block


class EagerModel:
    """One stream of greedy decoding. Positions below `length` are in the cache [layers, P, C+R]."""

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, np.ndarray], num_slots: int,
        dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu",
    ) -> None:  # fmt: skip
        """weights: float32 arrays by the names of DeepSeek checkpoints. num_slots: P, room for prompt and output."""
        self.config, self.dtype, self.device, self.length = config, dtype, torch.device(device), 0
        self._weights = weights
        self.embedding, self.norm, self.head = (
            self._take(name) for name in ("model.embed_tokens", "model.norm", "lm_head")
        )
        num_layers = config.num_hidden_layers
        self.layers = [(self._attention(i), self._feed_forward(i)) for i in range(num_layers)]
        self.cache = torch.zeros(num_layers, num_slots, config.latent_dim, dtype=dtype, device=device)
        half = config.qk_rope_head_dim // 2
        frequency = config.rope_theta ** (-np.arange(half, dtype=np.float64) / half)
        angle = torch.from_numpy(np.arange(num_slots)[:, None] * frequency)
        self.rotation = torch.polar(torch.ones_like(angle), angle).to(device, torch.complex64)

    def _take(self, name: str) -> Tensor:
        return torch.from_numpy(np.array(self._weights[f"{name}.weight"])).to(self.device, self.dtype)

    def _attention(self, layer: int) -> _Attention:
        c, name = self.config, f"model.layers.{layer}.self_attn."
        H, nope, rope, C = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim, c.kv_lora_rank
        paired = torch.arange(rope).view(2, -1).t().flatten()  # NeoX order to neighbouring pairs, for complex numbers
        q = self._take(name + "q_proj").view(H, nope + rope, -1)
        kv_b = self._take(name + "kv_b_proj").view(H, nope + c.v_head_dim, -1)
        kv_a = self._take(name + "kv_a_proj_with_mqa")
        return _Attention(
            self._take(f"model.layers.{layer}.input_layernorm"),
            torch.cat([q[:, :nope].flatten(0, 1), q[:, nope:][:, paired].flatten(0, 1), kv_a[:C], kv_a[C:][paired]]),
            self._take(name + "kv_a_layernorm"),
            kv_b[:, :nope].contiguous(),
            kv_b[:, nope:].transpose(1, 2).contiguous(),
            self._take(name + "o_proj").t().contiguous(),
        )

    def _feed_forward(self, layer: int) -> _FeedForward:
        c, name = self.config, f"model.layers.{layer}.mlp."
        norm = self._take(f"model.layers.{layer}.post_attention_layernorm")
        if c.is_dense_layer(layer):
            return _FeedForward(norm, None, [], self._gated(name))
        experts = [self._gated(f"{name}experts.{e}.") for e in range(c.n_routed_experts)]
        shared = self._gated(f"{name}shared_experts.") if c.n_shared_experts else None
        return _FeedForward(norm, self._take(name + "gate"), experts, shared)

    def _gated(self, name: str) -> _Gated:
        gate_up = torch.cat([self._take(name + "gate_proj"), self._take(name + "up_proj")])
        return _Gated(gate_up, self._take(name + "down_proj").t().contiguous())

    @torch.inference_mode()
    def prefill(self, prompt: Sequence[int]) -> None:
        """Put prompt[:-1] into the cache, token by token; the last token is left to `step`."""
        self.length = 0
        for token in prompt[:-1]:
            self.step(token)

    @torch.inference_mode()
    def step(self, token: int) -> Tensor:
        """Append one token: logits f32 [1, V] of the next."""
        x = self.embedding[token : token + 1]
        position, rotation = self.length, self.rotation[self.length]
        for layer, (attention, feed_forward) in enumerate(self.layers):
            x = self._attend(x, attention, self.cache[layer], position, rotation)
            x = self._feed(x, feed_forward)
        self.length += 1
        return linear(self._rms_norm(x, self.norm), self.head).float()

    @torch.inference_mode()
    def decode(self, token: int, num_tokens: int) -> list[int]:
        """Greedy decoding: the `num_tokens` tokens after `token`."""
        tokens = []
        for _ in range(num_tokens):
            token = int(self.step(token).argmax())
            tokens.append(token)
        return tokens

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.rms_norm(x, (weight.shape[0],), weight, self.config.rms_norm_eps)

    def _rope(self, x: Tensor, rotation: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().view(-1, rotation.shape[0], 2))
        return torch.view_as_real(pairs * rotation).view(x.shape).to(x.dtype)

    def _attend(
        self, x: Tensor, w: _Attention, cache: Tensor, position: int, rotation: Tensor
    ) -> Tensor:  # fmt: skip
        c = self.config
        H, C, R = c.num_attention_heads, c.kv_lora_rank, c.qk_rope_head_dim
        q_nope, rotated, latent, k_rope = linear(self._rms_norm(x, w.norm), w.q_kv_a).split_with_sizes(
            (H * c.qk_nope_head_dim, H * R, C, R), -1
        )
        row = cache[position]
        row[:C] = self._rms_norm(latent[0], w.kv_norm)
        row[C:] = self._rope(k_rope[0], rotation)
        q_latent = torch.bmm(q_nope.view(H, 1, -1), w.w_kc).view(H, C)
        q = torch.cat([q_latent, self._rope(rotated.view(H, R), rotation)], 1)
        keys = cache[: position + 1]
        probability = (torch.mm(q, keys.t()).float() * c.softmax_scale).softmax(-1).to(x.dtype)
        attended = torch.mm(probability, keys[:, :C])
        value = torch.bmm(attended.view(H, 1, C), w.w_vc)
        return torch.addmm(x, value.view(1, -1), w.o_proj_t)

    def _route(self, h: Tensor, router: Tensor) -> tuple[Tensor, Tensor]:
        """Weights f32 [1, top_k], not yet scaled, and ids i64 [1, top_k] of the experts of a row h [1, D]."""
        c = self.config
        logits = linear(h, router).float()
        scores = logits.softmax(-1) if c.scoring_func == "softmax" else logits.sigmoid()
        weight, expert_id = scores.topk(c.num_experts_per_tok)
        return weight / weight.sum(-1, keepdim=True) if c.norm_topk_prob else weight, expert_id

    def _feed(self, x: Tensor, w: _FeedForward) -> Tensor:
        h = self._rms_norm(x, w.norm)
        if w.always is not None:
            x = self._add_gated(x, h, w.always, None)
        if w.router is None:
            return x
        weight, expert_id = self._route(h, w.router)
        if self.config.routed_scaling_factor != 1.0:
            weight = weight * self.config.routed_scaling_factor
        for expert, share in zip(expert_id[0].tolist(), weight[0].tolist(), strict=True):
            x = self._add_gated(x, h, w.experts[expert], share)
        return x

    def _add_gated(self, x: Tensor, h: Tensor, w: _Gated, share: float | None) -> Tensor:
        gate, up = linear(h, w.gate_up).chunk(2, -1)
        return torch.addmm(x, silu(gate) * up, w.down_t, alpha=1.0 if share is None else share)
