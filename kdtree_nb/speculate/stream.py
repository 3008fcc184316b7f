"""Stream: one prompt on its way to a Generation, on the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from kdtree_nb.errors import NonFiniteError
from kdtree_nb.speculate.stats import Generation, GenerationStats


@dataclasses.dataclass
class Stream:
    """Tokens so far and the rules for stopping.

    tokens:       the prompt, then what was emitted; the last one is the bonus token
    max_tokens:   length of `tokens` at which the stream stops, for `limit_reason`
    stop_tokens:  ids that end the text; such a token is emitted, nothing after it is
    budget:       most tree nodes besides the root in one step
    """

    index: int
    tokens: list[int]
    num_prompt_tokens: int
    max_tokens: int
    limit_reason: str
    stop_tokens: frozenset[int]
    budget: int
    stats: GenerationStats = dataclasses.field(default_factory=GenerationStats)
    logits: list[torch.Tensor] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        if self.num_remaining == 0:
            self.finish_reason = self.limit_reason

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_tokens - len(self.tokens)

    def emit(self, chosen: Sequence[int]) -> list[int]:
        """Append the target's choices along the accepted path up to the first that stops the stream; return those kept.

        Raises NonFiniteError on a choice of -1, which says that the logits held a NaN.
        """
        emitted: list[int] = []
        for token in chosen:
            if token < 0:
                raise NonFiniteError(
                    f"verify: stream {self.index}: the target's logits at position {len(self.tokens) - 1} hold a NaN; "
                    "check the weights (and in BF16 their range)"
                )
            self.tokens.append(token)
            emitted.append(token)
            if token in self.stop_tokens:
                self.finish_reason = "eos"
            elif self.num_remaining == 0:
                self.finish_reason = self.limit_reason
            if self.finish_reason:
                break
        return emitted

    def record_step(self, num_nodes: int, num_accepted: int, num_emitted: int) -> None:
        """Count one verify step."""
        self.stats.nodes_per_step.append(num_nodes)
        self.stats.accepted_per_step.append(min(num_accepted, num_emitted))
        self.stats.num_tokens += num_emitted

    def result(self, seconds: dict[str, float], no_logits: torch.Tensor | None) -> Generation:
        """The finished generation; with logits where `no_logits` f32 [0, V] is given."""
        self.stats.seconds = dict(seconds)
        logits = None
        if no_logits is not None:
            with torch.inference_mode(False):  # an ordinary tensor, which the caller may change
                logits = torch.cat([no_logits, *self.logits])
        return Generation(self.tokens[self.num_prompt_tokens :], self.finish_reason or "length", self.stats, logits)
