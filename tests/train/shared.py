"""What several tests of training share, besides the fixtures of `conftest.py`."""

from __future__ import annotations

import torch

from kdtree_nb.config import ModelConfig
from kdtree_nb.train.plain_model import PlainModel


def random_model(config: ModelConfig, seed: int = 0) -> PlainModel:
    """A model in which nothing is zero or one; where its routers have biases, they change what is chosen."""
    torch.manual_seed(seed)
    model = PlainModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
        for buffer in model.buffers():
            buffer.add_(torch.randn_like(buffer))
    return model
