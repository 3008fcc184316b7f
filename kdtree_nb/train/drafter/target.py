"""What a drafter needs of its frozen target: embedding, head, and the hidden states of whole texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from kdtree_nb.model import Model
from kdtree_nb.native import ops
from kdtree_nb.speculate.text_hidden import text_hidden
from kdtree_nb.train.plain_model import PlainModel


class FrozenTarget(NamedTuple):
    """embedding and head [V, D]; features: texts i64 [N, T] -> [N, T, nD], what leaves n layers, side by side."""

    embedding: torch.Tensor
    head: torch.Tensor
    features: Callable[[torch.Tensor], torch.Tensor]

    @property
    def device(self) -> torch.device:
        """Where all of it is."""
        return self.embedding.device


def fast_dtype(device: torch.device) -> torch.dtype:
    """BF16 where the device multiplies matrices of it fast: GPUs, and CPUs with instructions for it (4 times FP32)."""
    is_fast = device.type == "cuda" or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if is_fast else torch.float32


def plain_target(model: PlainModel, layers: Sequence[int], dtype: torch.dtype) -> FrozenTarget:
    """Of a model in plain PyTorch, whose hidden states are computed in `dtype`."""

    @torch.no_grad()
    def features(texts: torch.Tensor) -> torch.Tensor:
        return model.hidden(texts, dtype, features=layers).features

    weights = (model.embed_tokens.weight, model.head_weight)
    return FrozenTarget(*(weight.detach().to(dtype) for weight in weights), features)


def engine_target(model: Model, layers: Sequence[int], dtype: torch.dtype | None = None) -> FrozenTarget:
    """Of an engine's model: the very bits that the drafter will be given, rounded to `dtype` where that is another."""
    dtype = model.dtype if dtype is None else dtype

    def features(texts: torch.Tensor) -> torch.Tensor:
        states = torch.cat(text_hidden(model, texts, layers), -1)
        return torch.empty_like(states, dtype=dtype).copy_(states)  # no longer a tensor of inference mode

    one = torch.eye(model.config.hidden_size, dtype=model.dtype, device=model.device)
    head = ops.linear(one, model.head).T.contiguous()  # the packed weights, out of their blocks
    return FrozenTarget(model.embedding.to(dtype), head.to(dtype), features)
