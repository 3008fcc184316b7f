"""AlwaysWrong: never drafts the token that the target will emit. The lower end of what drafting can give."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kdtree_nb.drafters.base import (
    DraftCandidates,
    DraftContext,
    StreamDraft,
    as_continuations,
    check_depth,
    stack,
    upcoming,
)


class AlwaysWrong:
    """Drafts, at every depth, tokens other than the target's. Every draft is rejected, so a step emits one token.

    continuations: what the target will emit after the prompt: one list of ids, or one per stream
    """

    def __init__(self, continuations: Sequence[int] | Sequence[Sequence[int]], depth: int = 7) -> None:
        self.depth = check_depth("AlwaysWrong", depth)
        self.continuations = as_continuations("AlwaysWrong", continuations)

    def draft(self, context: DraftContext) -> DraftCandidates:
        """Confident candidates, all of them wrong."""
        return stack([self._draft(context, row) for row in range(len(context.tokens))], context.device)

    def _draft(self, context: DraftContext, row: int) -> StreamDraft:
        avoid = np.asarray(upcoming("AlwaysWrong", context, row, self.continuations, self.depth), dtype=np.int64)
        width = min(context.num_candidates, context.vocab_size - 1)
        offsets = np.arange(1, width + 1)
        token_ids = (avoid[:, None] + offsets) % context.vocab_size
        log_probs = np.broadcast_to(-np.log(offsets + 1.0), token_ids.shape).astype(np.float32)
        return StreamDraft(log_probs, token_ids)
