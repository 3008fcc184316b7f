"""text_logits: what a drafter says at many places of a text that is there already, all at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kdtree_nb.drafters import DFlash
from kdtree_nb.model import Model
from kdtree_nb.speculate.text_hidden import text_hidden

NUM_AT_ONCE = 16
"""Places in one pass of the drafter."""


@torch.inference_mode()
def text_logits(drafter: DFlash, model: Model, text: Sequence[int], anchors: Sequence[int]) -> torch.Tensor:
    """Logits f32 [A, depth, V] of what follows the tokens at positions `anchors` of `text`, as while it is decoded.

    With greedy text of the target itself this tells what would be accepted at every place. Raises ValueError for
    positions outside the text.
    """
    if len(anchors) == 0 or min(anchors) < 0 or max(anchors) >= len(text):
        raise ValueError(f"text_logits: expected positions of 0 … {len(text) - 1}, got {list(anchors)!s:.60}")
    tokens = torch.tensor(list(text), device=model.device)
    streams = drafter.attach(model, 1, len(text))
    position = torch.arange(len(text), dtype=torch.int32, device=model.device)
    hidden = torch.cat(text_hidden(model, tokens[None], streams.feature_layers), 2)
    streams.remember(hidden[0], torch.zeros_like(position), position)
    parts = []
    for anchor in torch.tensor(list(anchors), device=model.device).split(NUM_AT_ONCE):
        parts.append(streams.logits(tokens[anchor], anchor.int(), torch.zeros_like(anchor, dtype=torch.int32)))
    return torch.cat(parts)
