"""Stream: one prompt on its way to a Generation, on the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from kdtree_nb.errors import NonFiniteError
from kdtree_nb.speculate.sampling import GREEDY, Sampling
from kdtree_nb.speculate.stats import STAGES, Generation, GenerationStats


class Commit(NamedTuple):
    """What of a stream is certain: how many tokens, steps and tensors of logits, and why it has finished, if it has."""

    num_tokens: int
    num_steps: int = 0
    num_logits: int = 0
    finish_reason: str | None = None


@dataclasses.dataclass
class Stream:
    """Tokens so far and the rules for stopping.

    index:        its number among those that were asked for, by which errors name it
    tokens:       the prompt, then what was emitted; the last one is the bonus token
    max_tokens:   length of `tokens` at which the stream stops, for `limit_reason`
    stop_tokens:  ids that end the text; such a token is emitted, nothing after it is
    budget:       most tree nodes besides the root in one step
    keeps_logits: whether `logits` are kept
    seat:         its place in a batch, -1 outside
    num_unfilled: tokens before the bonus token that the cache does not hold yet
    committed:    where `rollback` goes back to
    error:        what ended the stream, and no other
    """

    index: int
    tokens: list[int]
    num_prompt_tokens: int
    max_tokens: int
    limit_reason: str
    stop_tokens: frozenset[int]
    budget: int
    sampling: Sampling = GREEDY
    keeps_logits: bool = False
    seat: int = -1
    stats: GenerationStats = dataclasses.field(default_factory=GenerationStats)
    logits: list[torch.Tensor] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.num_unfilled = len(self.tokens) - 1
        if self.num_remaining == 0:
            self.finish_reason = self.limit_reason
        self.commit()

    @classmethod
    def nobody(cls, seat: int) -> Stream:
        """What stands in a free seat: a stream that has finished."""
        return cls(-1, [0], 1, 1, "length", frozenset(), 0, seat=seat)

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_tokens - len(self.tokens)

    def commit(self) -> None:
        """What was emitted so far will stay. A single assignment, which an interrupt comes before or after."""
        stats = self.stats
        self.committed = Commit(len(self.tokens), len(stats.nodes_per_step), len(self.logits), self.finish_reason)

    def cut(self) -> None:
        """Drop what was emitted since the last commit."""
        num_tokens, num_steps, num_logits, self.finish_reason = self.committed
        stats = self.stats
        for values, count in (
            (self.tokens, num_tokens), (stats.nodes_per_step, num_steps), (stats.accepted_per_step, num_steps),
            (self.logits, num_logits),
        ):  # fmt: skip
            del values[count:]
        stats.num_tokens = num_tokens - self.num_prompt_tokens

    def rollback(self) -> None:
        """As at the last commit, outside any batch, with nothing in a cache. It emits the same again from there."""
        self.cut()
        self.seat, self.num_unfilled = -1, len(self.tokens) - 1

    def fail(self, error: Exception) -> Exception:
        """`error`, which from now on is what ended this stream."""
        self.error = error
        return error

    def emit(self, chosen: Sequence[int]) -> list[int]:
        """Append the target's choices along the accepted path up to the first that stops the stream; return those kept.

        Raises NonFiniteError on a choice of -1, which says that the logits held a NaN.
        """
        emitted: list[int] = []
        for token in chosen:
            if token < 0:
                message = (
                    f"verify: stream {self.index}: the target's logits at position {len(self.tokens) - 1} hold a NaN; "
                    "check the weights (and in BF16 their range)"
                )
                raise self.fail(NonFiniteError(message))
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

    def add_seconds(self, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        """Count the seconds that each stage took between two looks at a batch's clock."""
        seconds = self.stats.seconds
        for stage in STAGES:
            seconds[stage] = seconds.get(stage, 0.0) + after[stage] - before[stage]

    def result(self, seconds: Mapping[str, float], no_logits: torch.Tensor | None) -> Generation:
        """The finished generation; with logits where `no_logits` f32 [0, V] is given."""
        self.stats.seconds = dict(seconds)
        logits = None
        if no_logits is not None:
            with torch.inference_mode(False):  # an ordinary tensor, which the caller may change
                logits = torch.cat([no_logits, *self.logits])
        return Generation(self.tokens[self.num_prompt_tokens :], self.finish_reason or "length", self.stats, logits)
