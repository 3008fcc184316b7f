"""The eager torch model in one CUDA graph per token: what torch does without a kernel of one's own and without Python.

Sizes must not change in a graph. So attention reads the whole cache under a mask, and the weights of the chosen experts
are copied; position and token stay on the device, and the text is read back once, at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from kdtree_nb.bench.eager_torch import EagerModel, _Attention, _FeedForward
from kdtree_nb.config import ModelConfig


class EagerGraphModel(EagerModel):
    """An EagerModel whose `decode` replays a graph. capture: makes what repeats a function's device work."""

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, np.ndarray], num_slots: int, dtype: torch.dtype,
        device: str | torch.device, capture: Callable[[Callable[[], None]], Callable[[], None]],
    ) -> None:  # fmt: skip
        super().__init__(config, weights, num_slots, dtype, device)
        self.experts = [self._stacked(f) for _, f in self.layers]
        self.token, self.place = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
        self.text = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.replay = capture(self._one_token)

    @staticmethod
    def _stacked(feed_forward: _FeedForward) -> tuple[Tensor, Tensor] | None:
        """gate_up [E, 2I, D] and down_t [E, I, D] of the routed experts."""
        if feed_forward.router is None:
            return None
        gate_up, down_t = zip(*feed_forward.experts, strict=True)
        return torch.stack(gate_up), torch.stack(down_t)

    @torch.inference_mode()
    def decode(self, token: int, num_tokens: int) -> list[int]:
        """Greedy decoding: the `num_tokens` tokens after `token`."""
        start = self.length
        self.token.fill_(token)
        self.place.fill_(start)
        for _ in range(num_tokens):
            self.replay()
        self.length += num_tokens
        return self.text[start : start + num_tokens].tolist()

    @torch.inference_mode()
    def _one_token(self) -> None:
        x, rotation = self.embedding[self.token], self.rotation[self.place]
        visible = torch.arange(self.cache.shape[1], device=self.device) <= self.place
        for (attention, feed_forward), cache, experts in zip(self.layers, self.cache, self.experts, strict=True):
            x = self._attend_all(x, attention, cache, visible, rotation)
            x = self._feed_indexed(x, feed_forward, experts)
        logits = linear(self._rms_norm(x, self.norm), self.head).float()
        self.token.copy_(logits.argmax(-1))
        self.text.index_copy_(0, self.place, self.token)
        self.place += 1

    def _attend_all(self, x: Tensor, w: _Attention, cache: Tensor, visible: Tensor, rotation: Tensor) -> Tensor:
        c = self.config
        H, C, R = c.num_attention_heads, c.kv_lora_rank, c.qk_rope_head_dim
        q_nope, rotated, latent, k_rope = linear(self._rms_norm(x, w.norm), w.q_kv_a).split_with_sizes(
            (H * c.qk_nope_head_dim, H * R, C, R), -1
        )
        row = torch.cat([self._rms_norm(latent, w.kv_norm), self._turned(k_rope.view(1, R), rotation)], 1)
        cache.index_copy_(0, self.place, row)
        q_latent = torch.bmm(q_nope.view(H, 1, -1), w.w_kc).view(H, C)
        q = torch.cat([q_latent, self._turned(rotated.view(H, R), rotation)], 1)
        scores = (torch.mm(q, cache.t()).float() * c.softmax_scale).masked_fill(~visible, -torch.inf)
        attended = torch.mm(scores.softmax(-1).to(x.dtype), cache[:, :C])
        value = torch.bmm(attended.view(H, 1, C), w.w_vc)
        return torch.addmm(x, value.view(1, -1), w.o_proj_t)

    def _turned(self, x: Tensor, rotation: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(x.shape[0], -1, 2))
        return torch.view_as_real(pairs * rotation).view(x.shape).to(x.dtype)

    def _feed_indexed(self, x: Tensor, w: _FeedForward, experts: tuple[Tensor, Tensor] | None) -> Tensor:
        h = self._rms_norm(x, w.norm)
        if w.always is not None:
            x = self._add_gated(x, h, w.always, None)
        if experts is None:
            return x
        weight, expert_id = self._route(h, w.router)
        gate_up, down_t = experts[0][expert_id[0]], experts[1][expert_id[0]]
        gate, up = torch.matmul(gate_up, h[0]).chunk(2, -1)
        share = (weight[0] * self.config.routed_scaling_factor).to(x.dtype)
        routed = torch.bmm((silu(gate) * up * share[:, None])[:, None], down_t)
        return x + routed.sum(0)
