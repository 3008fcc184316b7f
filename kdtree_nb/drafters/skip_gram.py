"""SkipGram: a table of what followed the last few tokens, 1, 2, 3 … tokens later, counted in a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from kdtree_nb.drafters.base import DraftCandidates, DraftContext, check_depth
from kdtree_nb.native import ops

MAX_CONTEXTS = 1 << 26
"""Most contexts that there may be: the table that finds a context's row holds 4 bytes for each."""

_UNSEEN = 0.01
"""Count of what was not seen."""


class Tables(NamedTuple):
    """logits bf16 [rows, L, V]; row_of i32 [V^order], the row of a context; place and weight i64 [order] of a context's
    tokens: how far from the last one, and what one of them counts for in the context's number."""

    logits: torch.Tensor
    row_of: torch.Tensor
    place: torch.Tensor
    weight: torch.Tensor


def _check_counts(vocab_size: int, order: int, min_count: int) -> None:
    for name, value, low in (("vocab_size", vocab_size, 1), ("order", order, 0), ("min_count", min_count, 1)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < low:
            raise ValueError(f"SkipGram: {name}: expected an integer of at least {low}, got {value!r}")
    if order > MAX_CONTEXTS.bit_length() or int(vocab_size) ** int(order) > MAX_CONTEXTS:
        raise ValueError(
            f"SkipGram: expected an order with vocab_size^order of at most {MAX_CONTEXTS}, got order {order} and "
            f"vocab_size {vocab_size}"
        )


class SkipGram:
    """Per depth d, log P(token d places on | the last `order` tokens), from counts over `tokens`.

    A context seen less than min_count times falls back to the tokens nearer the end, in the end to none. The tables
    take 2 depth V bytes for each context kept and 4 V^order to find it, so this is for small vocabularies. At a text's
    start the first token stands for those before it. It drafts on a device as well.
    """

    def __init__(
        self, tokens: Sequence[int] | np.ndarray, vocab_size: int, depth: int = 8, order: int = 2, min_count: int = 8
    ) -> None:
        _check_counts(vocab_size, order, min_count)
        text = np.asarray(tokens)
        is_list = text.ndim == 1 and len(text) > 0 and text.dtype.kind in "iu"
        if not is_list or text.min() < 0 or text.max() >= vocab_size:
            raise ValueError(f"SkipGram: expected tokens of 0 … {vocab_size - 1} in one list, got {tokens!r:.60}")
        text = text.astype(np.int64)
        self.depth, self.order, self.vocab_size = check_depth("SkipGram", depth), order, vocab_size
        logits, row_of = self._count(text, min_count)
        self._tables = {torch.device("cpu"): self._on_cpu(logits, row_of)}

    def _on_cpu(self, logits: np.ndarray, row_of: np.ndarray) -> Tables:
        place = torch.arange(self.order)
        return Tables(torch.from_numpy(logits).bfloat16(), torch.from_numpy(row_of), place, self.vocab_size**place)

    def _count(self, text: np.ndarray, min_count: int) -> tuple[np.ndarray, np.ndarray]:
        """Logits f32 [rows, L, V], and i32 [V^order]: the row of every context, least significant the last token."""
        V = self.vocab_size
        row_of = np.zeros(V**self.order, dtype=np.int32)
        levels, num_rows = [], 0
        context = np.zeros(len(text), dtype=np.int64)  # of the `order` tokens that end at each place
        for order in range(self.order + 1):
            codes, inverse, counts = np.unique(context[max(order - 1, 0) :], return_inverse=True, return_counts=True)
            kept = (counts >= min_count) | (order == 0)
            rows = np.cumsum(kept) - 1
            levels.append(self._follow(text, np.where(kept, rows, -1)[inverse], int(kept.sum()), max(order - 1, 0)))
            row_of.reshape(-1, V**order)[:, codes[kept]] = num_rows + rows[kept]
            num_rows += len(levels[-1])
            context[order:] += text[: len(text) - order] * V**order
        return np.concatenate(levels), row_of

    def _follow(self, text: np.ndarray, row: np.ndarray, num_rows: int, first: int) -> np.ndarray:
        """Logits f32 [num_rows, L, V] of what follows: row[i], or -1, is that of the context that ends at first + i."""
        logits = np.empty((num_rows, self.depth, self.vocab_size), dtype=np.float32)
        for level in range(self.depth):
            token = text[first + level + 1 :]
            from_row = row[: len(token)]
            pairs = (from_row * self.vocab_size + token)[from_row >= 0]
            seen = np.bincount(pairs, minlength=num_rows * self.vocab_size)
            logits[:, level] = np.log(seen.reshape(num_rows, self.vocab_size) + _UNSEEN)
        return logits

    def _on(self, device: torch.device) -> Tables:
        if device not in self._tables:
            self._tables[device] = Tables(*(table.to(device) for table in self._tables[torch.device("cpu")]))
        return self._tables[device]

    def _logits(self, last: torch.Tensor) -> torch.Tensor:
        """bf16 [S, L, V] behind the last tokens i64 [S, order], the very last one first."""
        tables = self._on(last.device)
        context = (last * tables.weight).sum(1)
        return tables.logits.index_select(0, tables.row_of.index_select(0, context))

    def draft(self, context: DraftContext) -> DraftCandidates:
        """The most frequent followers of each stream's last tokens. Raises ValueError for a model of another
        vocabulary."""
        if context.vocab_size != self.vocab_size:
            raise ValueError(
                f"SkipGram: expected a model of vocab_size {self.vocab_size}, that of its tables, got one of "
                f"{context.vocab_size}; count a text of the model's own tokens"
            )
        last = [[tokens[max(len(tokens) - 1 - i, 0)] for i in range(self.order)] for tokens in context.tokens]
        logits = self._logits(torch.tensor(last, dtype=torch.int64, device=context.device))
        return DraftCandidates(*ops.draft_topk(logits, context.num_candidates))

    def draft_on_device(self, state: ops.StreamState) -> torch.Tensor:
        """Logits bf16 [S, L, V] behind the last tokens of every stream's text."""
        place = (state.prefix_len.unsqueeze(1) - self._on(state.text.device).place).clamp_(min=0)
        return self._logits(state.text.gather(1, place))
