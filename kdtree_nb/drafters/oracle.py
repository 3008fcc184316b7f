"""Oracle: knows what the target will emit. The upper end of what drafting can give."""

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

_SPINE_PROB = 0.999
"""Mass on the true token: depth * log(0.999) stays above every sibling's log-prob up to depth 6,900."""


class Oracle:
    """Drafts the target's own continuation, `depth` tokens at a time.

    continuations: what the target will emit after the prompt: one list of ids, or one per stream
    siblings:      fill every depth up with random other tokens, which use up a larger budget; the true ones stay first
    """

    def __init__(
        self, continuations: Sequence[int] | Sequence[Sequence[int]], depth: int = 7, seed: int = 0,
        siblings: bool = True,
    ) -> None:  # fmt: skip
        self.depth = check_depth("Oracle", depth)
        self.seed = seed
        self.siblings = siblings
        self.continuations = as_continuations("Oracle", continuations)

    def draft(self, context: DraftContext) -> DraftCandidates:
        """The next tokens of each stream, the true one first at every depth."""
        return stack([self._draft(context, row) for row in range(len(context.tokens))], context.device)

    def _draft(self, context: DraftContext, row: int) -> StreamDraft:
        spine = np.asarray(upcoming("Oracle", context, row, self.continuations, self.depth), dtype=np.int64)
        width = min(context.num_candidates, context.vocab_size) if self.siblings else 1
        rng = np.random.default_rng([self.seed, context.stream_ids[row], len(context.tokens[row])])
        log_probs = np.empty((len(spine), width), dtype=np.float32)
        token_ids = np.empty((len(spine), width), dtype=np.int64)
        log_probs[:, 0] = np.log(_SPINE_PROB)
        token_ids[:, 0] = spine
        if width > 1:
            mass = np.sort(rng.random((len(spine), width - 1)) + 0.01, axis=1)[:, ::-1]
            log_probs[:, 1:] = np.log(mass / mass.sum(axis=1, keepdims=True) * (1 - _SPINE_PROB))
            for level, token in enumerate(spine):
                others = rng.permutation(context.vocab_size)
                token_ids[level, 1:] = others[others != token][: width - 1]
        return StreamDraft(log_probs, token_ids)
