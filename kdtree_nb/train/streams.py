"""Streams of token ids: random windows to train on, and how well a model predicts a stream."""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from kdtree_nb.train.plain_model import PlainModel


def upload(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`values`, which lie on the host, on `device`. From pinned memory: a plain copy waits until the GPU is idle."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def sample_windows(stream: torch.Tensor, num_windows: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """int64 [num_windows, length] pieces of a stream of token ids at random places. Raises ValueError for a shorter
    stream."""
    if len(stream) < length:
        raise ValueError(f"sample_windows: expected a stream of at least {length} tokens, got {len(stream)}")
    start = torch.randint(0, len(stream) - length + 1, (num_windows, 1), generator=generator)
    return stream[upload(start, stream.device) + torch.arange(length, device=stream.device)].long()


def next_token_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean negative log-likelihood in nats: logits [batch, positions, vocab], target [batch, positions]."""
    return functional.cross_entropy(logits.float().flatten(0, 1), target.flatten())


@torch.no_grad()
def measure(
    model: PlainModel, stream: torch.Tensor, dtype: torch.dtype, max_windows: int, context: int = 1024
) -> tuple[float, list[list[float]]]:
    """(bits per token, expert load [MoE layers][experts]) over up to `max_windows` windows of `context` tokens spread
    over a stream. Raises ValueError for a shorter stream."""
    num_windows = min(max_windows, (len(stream) - 1) // context)
    if num_windows < 1:
        raise ValueError(f"measure: expected a stream of more than {context} tokens, got {len(stream)}")
    starts = torch.linspace(0, len(stream) - context - 1, num_windows).long().to(stream.device)
    nats, loads = 0.0, []
    for start in starts.split(32):
        window = stream[start[:, None] + torch.arange(context + 1, device=stream.device)].long()
        logits, layer_loads, _ = model(window[:, :-1], dtype)
        nats += next_token_loss(logits, window[:, 1:]).item() * len(start)
        loads.append(torch.stack(layer_loads) * len(start))
    return nats / num_windows / math.log(2), (torch.stack(loads).sum(0) / num_windows).tolist()
