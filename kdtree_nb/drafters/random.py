"""Random: drafts tokens drawn at random, with random weights. A drafter that knows nothing must cost no exactness."""

from __future__ import annotations

import numpy as np

from kdtree_nb.drafters.base import DraftCandidates, DraftContext, StreamDraft, check_depth, stack


class Random:
    """Random distinct tokens per depth. The same seed, stream and position give the same draft."""

    def __init__(self, depth: int = 7, seed: int = 0) -> None:
        self.depth = check_depth("Random", depth)
        self.seed = seed

    def draft(self, context: DraftContext) -> DraftCandidates:
        """Candidates whose probabilities add up to 1 at every depth."""
        return stack([self._draft(context, row) for row in range(len(context.tokens))], context.device)

    def _draft(self, context: DraftContext, row: int) -> StreamDraft:
        rng = np.random.default_rng([self.seed, context.stream_ids[row], len(context.tokens[row])])
        width = min(context.num_candidates, context.vocab_size)
        every_id = np.broadcast_to(np.arange(context.vocab_size), (self.depth, context.vocab_size))
        token_ids = rng.permuted(every_id, axis=1)[:, :width].astype(np.int64)
        mass = np.sort(rng.exponential(size=(self.depth, width)) + 1e-6, axis=1)[:, ::-1]
        log_probs = np.minimum(np.log(mass / mass.sum(axis=1, keepdims=True)), 0.0)
        return StreamDraft(log_probs.astype(np.float32), token_ids)
