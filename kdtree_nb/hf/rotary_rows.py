"""Rows of projections that are rotated: checkpoints have the pairs side by side (2i, 2i + 1), the engine R/2 apart."""

from __future__ import annotations

import torch

from kdtree_nb.config import ModelConfig


def plain_rows(config: ModelConfig, name: str) -> int | None:
    """Rows before the rotated ones in every block of rows of the tensor `name`; None if it has no rotated rows."""
    if name.endswith(("self_attn.q_proj.weight", "self_attn.q_b_proj.weight")):
        return config.qk_nope_head_dim
    return config.kv_lora_rank if name.endswith("self_attn.kv_a_proj_with_mqa.weight") else None


def to_neox(weight: torch.Tensor, num_plain: int, rope_dim: int) -> torch.Tensor:
    """[N, K] whose blocks are num_plain + rope_dim rows: rotated rows 0, 2, 4, …, then 1, 3, 5, …"""
    plain, pairs = _split(weight, num_plain, rope_dim)
    return torch.cat([plain, pairs[:, 0::2], pairs[:, 1::2]], dim=1).view_as(weight)


def to_interleaved(weight: torch.Tensor, num_plain: int, rope_dim: int) -> torch.Tensor:
    """The inverse of `to_neox`."""
    plain, halves = _split(weight, num_plain, rope_dim)
    first, second = halves.chunk(2, dim=1)
    return torch.cat([plain, torch.stack([first, second], dim=2).flatten(1, 2)], dim=1).view_as(weight)


def _split(weight: torch.Tensor, num_plain: int, rope_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = weight.view(-1, num_plain + rope_dim, weight.shape[1])
    return blocks[:, :num_plain], blocks[:, num_plain:]
