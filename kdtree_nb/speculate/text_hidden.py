"""text_hidden: the target's hidden states of whole texts, as they would be seen while decoding them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kdtree_nb.model import Model
from kdtree_nb.native import ops
from kdtree_nb.speculate.drafting import chain_trees

CHUNK_TOKENS = 256
"""Tokens of each text in one forward. The result does not depend on it."""


@torch.inference_mode()
def text_hidden(model: Model, texts: torch.Tensor, layers: Sequence[int]) -> list[torch.Tensor]:
    """What leaves `layers` at every token of texts i64 [N, T]: float [N, T, D] for each layer.

    The same bits as those that a drafter is given while the texts are decoded. Raises ValueError on ids outside the
    vocabulary.
    """
    num_texts, length = texts.shape
    if length and not 0 <= texts.min() <= texts.max() < model.config.vocab_size:
        raise ValueError(
            f"text_hidden: token: expected ids of 0 … {model.config.vocab_size - 1}, got {texts.min()} … {texts.max()}"
        )
    cache = model.new_cache(num_texts, length)
    prefix_len = torch.zeros(num_texts, dtype=torch.int32, device=model.device)
    parts: list[list[torch.Tensor]] = [[] for _ in layers]
    for chunk in texts.split(CHUNK_TOKENS, 1):
        tree, hidden = chain_trees(chunk.tolist(), model.device), dict.fromkeys(layers)
        rows = ops.tree_rows(tree, prefix_len)
        model.forward(rows, tree, cache, prefix_len, need_logits=False, hidden=hidden)
        prefix_len.add_(tree.num_nodes)
        for part, states in zip(parts, hidden.values(), strict=True):
            part.append(states.view(*chunk.shape, -1))
    return [torch.cat(part, 1) for part in parts]
