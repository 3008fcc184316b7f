"""DFlashStreams: a drafter at the streams of a batch, with the keys and values of their contexts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kdtree_nb.drafters.base import DraftCandidates, DraftContext, likeliest
from kdtree_nb.drafters.dflash.config import DFlashConfig
from kdtree_nb.drafters.dflash.layers import Block, PackedDrafter, visible
from kdtree_nb.model import Model
from kdtree_nb.model.rotary import angle_table
from kdtree_nb.native import ops
from kdtree_nb.native.devices import memory_for


class DFlashStreams:
    """Drafts for S streams behind what it remembers of them.

    keys, values: [S, P, L, K, d], by position. A block's own lie behind the context while it is drafted; what the
    target has accepted then takes their place. The last slot is for what is no token, and is never read.
    """

    def __init__(
        self, config: DFlashConfig, packed: PackedDrafter, model: Model, num_streams: int, num_slots: int,
        block_size: int, depth: int,
    ) -> None:  # fmt: skip
        self.feature_layers, self.depth = config.target_layer_ids, depth
        self._config, self._packed, self._model, self._block_size = config, packed, model, block_size
        num_positions, device = num_slots + block_size, model.device
        shape = (num_streams, num_positions + 1, config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
        what = f"DFlash: expected memory for the context of {num_streams} streams of {num_slots} tokens"
        with memory_for(what, device, "Use fewer streams or a shorter max_seq_len."):
            self.keys, self.values = (torch.zeros(shape, dtype=model.dtype, device=device) for _ in range(2))
        theta, yarn = config.rope_theta, config.rope_scaling
        self._cos_sin = angle_table(num_positions, config.head_dim, theta, yarn, device)
        self._all = torch.arange(num_streams, device=device)
        self._offset = torch.arange(block_size, dtype=torch.int32, device=device)
        self._masks = torch.full((1, block_size - 1), config.mask_token_id, device=device)

    def remember(self, hidden: Sequence[torch.Tensor], stream: torch.Tensor, position: torch.Tensor) -> None:
        """Add committed tokens to the contexts; see AttachedDrafter."""
        keys, values = self._packed.projections(hidden, position.clamp(min=0), self._cos_sin)
        row = stream.clamp(min=0).long()
        slot = position.long()  # -1 is the last slot
        self.keys[row, slot] = keys
        self.values[row, slot] = values

    def draft(self, context: DraftContext) -> DraftCandidates:
        """The likeliest tokens of each depth behind the bonus tokens."""
        bonus = torch.tensor([tokens[-1] for tokens in context.tokens], device=context.device)
        prefix_len = [len(tokens) - 1 for tokens in context.tokens]
        end = max(prefix_len) + self._block_size
        rows = None
        if context.stream_ids != list(range(len(self.keys))):
            rows = torch.tensor(context.stream_ids, device=context.device)
        lengths = torch.tensor(prefix_len, dtype=torch.int32, device=context.device)
        logits = self.logits(bonus, lengths, rows, end)
        return likeliest(self._model.ranks, logits, context.vocab_size, context.num_candidates)

    def draft_on_device(self, state: ops.StreamState) -> torch.Tensor:
        """Logits f32 [S, depth, V] behind the bonus tokens of all streams; of several ranks each has its part of V."""
        return self.logits(state.bonus, state.prefix_len)

    def logits(
        self, bonus: torch.Tensor, prefix_len: torch.Tensor, rows: torch.Tensor | None = None, end: int | None = None
    ) -> torch.Tensor:
        """Logits f32 [A, depth, V] of what follows A bonus tokens; of several ranks each has its part of V.

        bonus i64 [A] stands at position prefix_len i32 [A] of stream rows i64 [A]: any streams, the same one several
        times, at any place whose context is remembered; or all of them in order, where rows is None. end: no block
        reaches further, by default P.
        """
        end = self.keys.shape[1] - 1 if end is None else end
        block_size = self._block_size
        slot = prefix_len[:, None] + self._offset
        token = torch.cat([bonus[:, None], self._masks.expand(len(bonus), -1)], 1)
        row = torch.arange(len(bonus), device=bonus.device) if rows is not None else self._all
        masks = visible(self._config, prefix_len, block_size, end)
        block = Block(row, slot.long(), slot.flatten(), masks)
        x = ops.embed(self._model.embedding, token.flatten())
        for index, layer in enumerate(self._packed.layers):
            keys, values = (
                kept[:, :end, index] if rows is None else kept[rows, :end, index] for kept in (self.keys, self.values)
            )
            x = layer(x, keys, values, self._cos_sin, block, masks[index])
        drafted = x.view(len(bonus), block_size, -1)[:, 1 : self.depth + 1].flatten(0, 1)
        drafted = ops.rms_norm(drafted, self._packed.norm, self._config.rms_norm_eps)
        return ops.linear(drafted, self._model.head, None, True).view(len(bonus), self.depth, -1)
