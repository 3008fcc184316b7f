"""DFlashStreams: a drafter at the streams of a batch, with the keys and values of their contexts."""

from __future__ import annotations

import torch

from kdtree_nb.drafters.base import DraftCandidates, DraftContext, likeliest
from kdtree_nb.drafters.dflash.config import DFlashConfig
from kdtree_nb.drafters.dflash.layers import Block, Contexts, PackedDrafter
from kdtree_nb.model import Model
from kdtree_nb.model.rotary import angle_table
from kdtree_nb.native import ops
from kdtree_nb.native.devices import memory_for


class DFlashStreams:
    """Drafts for S streams behind what it remembers of them.

    contexts: of the committed tokens, by position. A block's own keys and values are never kept.
    """

    def __init__(
        self, config: DFlashConfig, packed: PackedDrafter, model: Model, num_streams: int, num_slots: int,
        block_size: int, depth: int,
    ) -> None:  # fmt: skip
        self.feature_layers, self.depth = config.target_layer_ids, depth
        self._config, self._packed, self._model, self._block_size = config, packed, model, block_size
        device, dim = model.device, config.head_dim
        shape = (num_streams, num_slots, config.num_hidden_layers, config.num_key_value_heads, dim)
        cos_sin = angle_table(num_slots + block_size, dim, config.rope_theta, config.rope_scaling, device)
        what = f"DFlash: expected memory for the context of {num_streams} streams of {num_slots} tokens"
        with memory_for(what, device, "Use fewer streams or a shorter max_seq_len."):
            keys, values = (torch.zeros(shape, dtype=model.dtype, device=device) for _ in range(2))
        self.contexts = Contexts(keys, values, cos_sin)
        self._all = torch.arange(num_streams, dtype=torch.int32, device=device)
        self._masks = torch.full((1, block_size - 1), config.mask_token_id, device=device)

    def remember(self, features: torch.Tensor, stream: torch.Tensor, position: torch.Tensor) -> None:
        """Add committed tokens to the contexts; see AttachedDrafter."""
        self._packed.projections.remember(features, stream.contiguous(), position.contiguous(), self.contexts)

    def draft(self, context: DraftContext) -> DraftCandidates:
        """The likeliest tokens of each depth behind the bonus tokens."""
        bonus = torch.tensor([tokens[-1] for tokens in context.tokens], device=context.device)
        prefix_len = [len(tokens) - 1 for tokens in context.tokens]
        stream, lengths = (
            torch.tensor(ints, dtype=torch.int32, device=context.device) for ints in (context.stream_ids, prefix_len)
        )
        logits = self.logits(bonus, lengths, stream)
        return likeliest(self._model.ranks, logits, context.vocab_size, context.num_candidates)

    def draft_on_device(self, state: ops.StreamState) -> torch.Tensor:
        """Logits f32 [S, depth, V] behind the bonus tokens of all streams; of several ranks each has its part of V."""
        return self.logits(state.bonus, state.prefix_len, self._all)

    def logits(self, bonus: torch.Tensor, prefix_len: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        """Logits f32 [A, depth, V] of what follows A bonus tokens; of several ranks each has its part of V.

        bonus i64 [A] stands at position prefix_len i32 [A] of streams i32 [A]: any streams, the same one several
        times, at any place whose context is remembered.
        """
        token = torch.cat([bonus[:, None], self._masks.expand(len(bonus), -1)], 1)
        block = Block(stream, prefix_len, self._block_size)
        x = ops.embed(self._model.embedding, token.flatten())
        for layer in self._packed.layers:
            x = layer(x, block, self.contexts)
        drafted = x.view(len(bonus), self._block_size, -1)[:, 1 : self.depth + 1].flatten(0, 1)
        drafted = ops.rms_norm(drafted, self._packed.norm, self._config.rms_norm_eps)
        return ops.linear(drafted, self._model.head, None, True).view(len(bonus), self.depth, -1)
