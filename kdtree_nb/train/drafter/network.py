"""The drafter in plain PyTorch, for training: many blocks per text at once. `kdtree_nb.drafters.dflash` is what drafts.

The names of the parameters are those of checkpoints.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from kdtree_nb.drafters import DFlashConfig
from kdtree_nb.train.plain_layers import DenseMLP, Linear, RMSNorm, rope, rope_table


class Attention(nn.Module):
    """Each token of a block attends to the context before its block, and to the block. Keys are normed per head."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = c = config
        self.q_proj = Linear(c.hidden_size, c.num_attention_heads * c.head_dim)
        self.k_proj = Linear(c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.v_proj = Linear(c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.o_proj = Linear(c.num_attention_heads * c.head_dim, c.hidden_size, zero=True)
        self.q_norm, self.k_norm = (RMSNorm(c.head_dim, c.rms_norm_eps) for _ in range(2))

    def forward(
        self, x: torch.Tensor, context: torch.Tensor, angles: tuple[torch.Tensor, ...], mask: torch.Tensor
    ) -> torch.Tensor:
        """x [B, A, b, D], context [B, T, D], mask bool [B, 1, A, 1, b, T + b] -> as x.

        angles: cosines and sines of the blocks' positions [B, A * b, 1, d / 2], then of the context's [T, 1, d / 2]
        """
        B, A, b, _ = x.shape
        K, g, d = self.config.num_key_value_heads, self.config.num_groups, self.config.head_dim
        cos, sin, context_cos, context_sin = angles
        rows = x.flatten(1, 2)
        q = rope(self.q_norm(self.q_proj(rows).unflatten(-1, (K * g, d))), cos, sin)
        q = q.view(B, A, b, K, g, d).permute(0, 3, 1, 4, 2, 5)  # [B, K, A, g, b, d]
        k = rope(self.k_norm(self.k_proj(rows).unflatten(-1, (K, d))), cos, sin)
        k, v = (y.view(B, A, b, K, d).permute(0, 3, 1, 2, 4) for y in (k, self.v_proj(rows)))  # [B, K, A, b, d]
        old_k = rope(self.k_norm(self.k_proj(context).unflatten(-1, (K, d))), context_cos, context_sin)
        old_v = self.v_proj(context).unflatten(-1, (K, d))
        old_k, old_v = (y.transpose(1, 2) for y in (old_k, old_v))  # [B, K, T, d]
        to_old = (q.flatten(2, 4) @ old_k.mT).unflatten(2, (A, g, b))
        to_own = (q.flatten(3, 4) @ k.mT).unflatten(3, (g, b))
        score = torch.cat([to_old, to_own], -1).float() * d**-0.5
        weight = score.masked_fill(~mask, -torch.inf).softmax(-1).to(x.dtype)
        of_old, of_own = weight.split([old_k.shape[2], b], -1)
        mixed = (of_old.flatten(2, 4) @ old_v).view(B, K, A, g, b, d) + (of_own.flatten(3, 4) @ v).unflatten(3, (g, b))
        return self.o_proj(mixed.permute(0, 2, 4, 1, 3, 5).reshape(B, A, b, K * g * d))


class Layer(nn.Module):
    """Attention, then SwiGLU; both add their input to their output."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = DenseMLP(config.hidden_size, config.intermediate_size)

    def forward(
        self, x: torch.Tensor, context: torch.Tensor, angles: tuple[torch.Tensor, ...], mask: torch.Tensor
    ) -> torch.Tensor:
        """Arguments as in `Attention`."""
        x = x + self.self_attn(self.input_layernorm(x), context, angles, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class DrafterNetwork(nn.Module):
    """Parameters are float32; activations have the dtype of the features."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        if config.rope_scaling is not None:
            raise ValueError("DrafterNetwork: expected plain rotary frequencies, got YaRN, which is not trained with")
        self.config = config
        self.fc = Linear(config.num_features, config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, features: torch.Tensor, embedding: torch.Tensor, bonus: torch.Tensor, anchor: torch.Tensor,
        size: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """What the head is applied to: [B, A, b - 1, D] for A blocks in each of B texts, b = block_size.

        features [B, T, nD]: the target's hidden states; embedding [V, D]: the target's. Per block i64 [B, A]: bonus,
        the first token; anchor, its position, and the context is what lies before; size, 2 … b, how many of its tokens
        there are. What lies behind them means nothing.
        """
        c, T = self.config, features.shape[1]
        context = self.hidden_norm(self.fc(features))
        offset = torch.arange(c.block_size, device=bonus.device)
        token = torch.where(offset > 0, c.mask_token_id, bonus[..., None])
        x = functional.embedding(token, embedding).to(features.dtype)
        position = (anchor[..., None] + offset).flatten(1)
        cos, sin = rope_table(T + c.block_size, c.head_dim, c.rope_theta, like=x)
        angles = (cos[position], sin[position], cos[:T], sin[:T])
        masks = {kind: self._mask(anchor, size, T, *kind) for kind in set(self._kinds)}
        for layer, kind in zip(self.layers, self._kinds, strict=True):
            x = layer(x, context, angles, masks[kind])
        return self.norm(x[:, :, 1:])

    @property
    def _kinds(self) -> list[tuple[int | None, bool]]:
        return list(zip(self.config.windows, self.config.causal, strict=True))

    def _mask(
        self, anchor: torch.Tensor, size: torch.Tensor, num_positions: int, window: int | None, causal: bool
    ) -> torch.Tensor:
        """bool [B, 1, A, 1, b, T + b]: whether the token of a block sees a position of the text, or of the block."""
        offset = torch.arange(self.config.block_size, device=anchor.device)
        first = anchor[:, None, :, None, None, None]
        query = first + offset[:, None]
        old = torch.arange(num_positions, device=anchor.device).expand(*query.shape[:-1], -1)
        own = (first + offset).expand(*query.shape[:-1], -1)
        sees_own = (own < first + size[:, None, :, None, None, None]) & ((own <= query) if causal else True)
        position, seen = torch.cat([old, own], -1), torch.cat([old < first, sees_own], -1)
        if window is not None:
            seen = seen & (query - position < window) & (position - query < window)
        return seen
