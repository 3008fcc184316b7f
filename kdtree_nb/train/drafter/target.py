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


def plain_target(model: PlainModel, layers: Sequence[int], dtype: torch.dtype) -> FrozenTarget:
    """Of a model in plain PyTorch, whose hidden states are computed in `dtype`."""

    @torch.no_grad()
    def features(texts: torch.Tensor) -> torch.Tensor:
        return model.hidden(texts, dtype, features=layers).features

    weights = (model.embed_tokens.weight, model.head_weight)
    return FrozenTarget(*(weight.detach().to(dtype) for weight in weights), features)


def engine_target(model: Model, layers: Sequence[int]) -> FrozenTarget:
    """Of an engine's model: the very bits that the drafter will be given."""

    def features(texts: torch.Tensor) -> torch.Tensor:
        return torch.cat(text_hidden(model, texts, layers), -1).clone()  # no longer a tensor of inference mode

    one = torch.eye(model.config.hidden_size, dtype=model.dtype, device=model.device)
    head = ops.linear(one, model.head).T.contiguous()  # the packed weights, out of their blocks
    return FrozenTarget(model.embedding, head, features)
