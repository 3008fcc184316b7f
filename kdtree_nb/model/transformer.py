"""The target model: embedding, layers of attention and feed-forward, head. The whole forward pass is in this file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from kdtree_nb.config import ModelConfig
from kdtree_nb.model.hf_tokenizer import Tokenizer
from kdtree_nb.model.latent_cache import LatentCache
from kdtree_nb.model.mla import Attention
from kdtree_nb.model.ranks import ONE_RANK, Ranks
from kdtree_nb.model.tokenizer import ByteTokenizer
from kdtree_nb.native import ops
from kdtree_nb.tree import DraftTree


@dataclasses.dataclass(frozen=True)
class Layer:
    """One decoder layer; both parts add their input to their output."""

    attention: Attention
    feed_forward: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]


class Model:
    """An MLA + MoE decoder over the rows of a step. embedding [V, D], norm [D], head packed [V, D].

    Of several `ranks` each has a share of the heads, of the widths and of the head's rows; the embedding, the norms,
    the routers and the latent cache are the same on all.
    """

    def __init__(
        self, config: ModelConfig, embedding: torch.Tensor, layers: list[Layer], norm: torch.Tensor,
        head: ops.PackedLinear, ranks: Ranks = ONE_RANK,
    ) -> None:  # fmt: skip
        self.config, self.ranks = config, ranks
        self.embedding, self.layers, self.norm, self.head = embedding, layers, norm, head
        self.settled = ops.settle(norm)
        self.dtype, self.device = embedding.dtype, embedding.device
        self.tokenizer: Tokenizer = ByteTokenizer()

    def new_cache(self, num_streams: int, num_slots: int) -> LatentCache:
        """An empty cache for `num_streams` streams of `num_slots` tokens each, in the model's dtype."""
        return LatentCache(self.config, num_streams, num_slots, self.dtype, self.device)

    def tensors(self) -> list[torch.Tensor]:
        """What a forward reads besides its arguments: weights as they are packed, and tables."""
        parts = [self, *(part for layer in self.layers for part in (layer.attention, layer.feed_forward))]
        values = [value for part in parts for value in getattr(part, "__dict__", {}).values()]
        flat = [v for value in values for v in (value if isinstance(value, tuple) else (value,))]
        return [v for v in flat if isinstance(v, torch.Tensor)]

    def forward(
        self, rows: ops.Rows, tree: DraftTree, cache: LatentCache, prefix_len: torch.Tensor, need_logits: bool = True,
        hidden: dict[int, torch.Tensor | None] | None = None,
    ) -> torch.Tensor | None:  # fmt: skip
        """Logits f32 [T, V] of the T rows of `tree` (see `ops.tree_rows`), or None where they are not needed.

        Of padded rows (`ops.tree_rows_padded`) only those in use have logits. Of several ranks each has those of its
        part of the vocabulary (`ranks.all_logits`).

        Row t attends to its stream's first prefix_len [S] slots, to its ancestors and to itself. Every row is appended
        to the cache at slot prefix_len + node. Raises ValueError on a token outside the vocabulary or a full cache.

        hidden: its keys are layers, and its values become what leaves them, float [T, D]
        """
        used = rows.num_rows
        x = ops.embed(self.embedding, rows.token, used)
        for index, layer in enumerate(self.layers):
            x = layer.attention(x, rows, tree, cache, prefix_len)
            x = layer.feed_forward(x, used)
            if hidden and index in hidden:
                hidden[index] = x
        if not need_logits:
            return None
        x = ops.rms_norm(x, self.norm, self.config.rms_norm_eps, used, self.settled)
        return ops.linear(x, self.head, None, True, used)
