"""Angles of the rotary embedding: plain, or stretched by YaRN for texts longer than the model was first trained on."""

from __future__ import annotations

import math

import numpy as np
import torch

from kdtree_nb.config import ModelConfig, Yarn


def rope_table(config: ModelConfig, device: torch.device) -> torch.Tensor:
    """f32 [P, R]: R/2 cosines, then R/2 sines, of every absolute position; computed in float64 and rounded once."""
    num_positions, dim = config.max_position_embeddings, config.qk_rope_head_dim
    return angle_table(num_positions, dim, config.rope_theta, config.rope_scaling, device)


def angle_table(num_positions: int, dim: int, theta: float, yarn: Yarn | None, device: torch.device) -> torch.Tensor:
    """`rope_table` of P positions and R = dim."""
    frequency = theta ** (-np.arange(dim // 2) / (dim // 2))
    amplitude = 1.0
    if yarn is not None:
        frequency = stretch(frequency, yarn, theta)
        amplitude = yarn.amplitude
    angle = np.arange(num_positions, dtype=np.float64)[:, None] * frequency
    table = amplitude * np.concatenate([np.cos(angle), np.sin(angle)], axis=1)
    return torch.from_numpy(table.astype(np.float32)).to(device)


def stretch(frequency: np.ndarray, yarn: Yarn, theta: float) -> np.ndarray:
    """YaRN on float64 [R/2] frequencies: those that turn often within the original length stay, slow ones are divided
    by the factor, and a ramp over the index leads from one to the other."""
    dim = 2 * len(frequency)
    first = max(math.floor(_index_of(yarn.beta_fast, yarn, theta, dim)), 0)
    last = min(math.ceil(_index_of(yarn.beta_slow, yarn, theta, dim)), dim - 1)
    width = last - first if last != first else 0.001  # the ramp is then a step
    divided = np.clip((np.arange(len(frequency)) - first) / width, 0.0, 1.0)
    return frequency * (1.0 - divided) + frequency / yarn.factor * divided


def _index_of(num_turns: float, yarn: Yarn, theta: float, dim: int) -> float:
    """The index, not whole, of the frequency that turns `num_turns` times within the original length."""
    return dim * math.log(yarn.original_max_position_embeddings / (num_turns * 2 * math.pi)) / (2 * math.log(theta))
