"""Handle: what `submit` gives for a stream: its tokens as they come, its result, and a way to stop it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from kdtree_nb.speculate.stats import Generation, GenerationStats
from kdtree_nb.speculate.stream import Stream

if TYPE_CHECKING:
    from kdtree_nb.speculate.streams import Streams

CANCELLED = "cancelled"
CLOSED = "closed"


@dataclasses.dataclass
class Latency:
    """Seconds on the clock since the stream was submitted.

    seat_s:  when it had got a seat; None before
    token_s: when each token could be read; those of one step at once
    """

    seat_s: float | None = None
    token_s: list[float] = dataclasses.field(default_factory=list)


class Handle:
    """One submitted stream. Nothing happens to it by itself: who waits for its tokens takes the engine's steps, and so
    moves all other streams along.

    index:   its number among the streams of the engine, by which errors name it
    latency: what its tokens had to wait for
    """

    def __init__(self, streams: Streams, stream: Stream, no_logits: torch.Tensor | None) -> None:
        self.index, self.latency, self.stream = stream.index, Latency(), stream
        self._streams, self._no_logits = streams, no_logits
        self._start_s = time.perf_counter()
        self._result: Generation | None = None

    def __repr__(self) -> str:
        state = "error" if self.stream.error else self.finish_reason or "unfinished"
        return f"<Handle {self.index}: {self.num_tokens} tokens, {state}>"

    @property
    def num_tokens(self) -> int:
        """How many tokens were emitted so far."""
        return self.stream.committed.num_tokens - self.stream.num_prompt_tokens

    @property
    def tokens(self) -> list[int]:
        """What was emitted so far, without the prompt."""
        return self._tokens(0)

    def _tokens(self, first: int) -> list[int]:
        stream = self.stream
        return stream.tokens[stream.num_prompt_tokens + first : stream.committed.num_tokens]

    @property
    def finish_reason(self) -> str | None:
        """As in a Generation; None as long as more may come, and of a stream that an error ended."""
        return self.stream.committed.finish_reason

    @property
    def is_finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.finish_reason is not None or self.stream.error is not None

    @property
    def stats(self) -> GenerationStats:
        """The stream's steps so far; their seconds are those of all streams that took part."""
        return self.stream.stats

    def __iter__(self) -> Iterator[int]:
        """All tokens from the first on, taking steps where the next one is not there yet. Raises as `result` does."""
        place = 0
        while True:
            is_finished, tokens = self.is_finished, self._tokens(place)
            yield from tokens
            place += len(tokens)
            if is_finished:
                self._check()
                return
            self._streams.wait_for(self, place + 1)

    def result(self) -> Generation:
        """Takes steps until the stream has finished. A stream that was cancelled has the tokens it got until then.

        Raises what ended this stream, such as NonFiniteError; and what a step raises that concerns no stream alone.
        """
        self._streams.wait_for(self, self.stream.max_tokens)
        self._check()
        if self._result is None:
            self._result = self.stream.result(self.stats.seconds, self._no_logits)
        return self._result

    def cancel(self) -> bool:
        """Stop here; the seat is free for another stream. False where the stream had finished by itself.

        Raises ValueError where it was cancelled before.
        """
        if self.finish_reason == CANCELLED:
            raise ValueError(f"cancel: stream {self.index}: expected one that was not cancelled yet, got it again")
        return self._streams.end(self, CANCELLED)

    def _check(self) -> None:
        if self.stream.error:
            raise self.stream.error

    def stamp(self, begin_s: float, end_s: float) -> None:
        """Note a turn of the loop that the stream took part in, by when it began and ended on the clock."""
        latency = self.latency
        if latency.seat_s is None:
            latency.seat_s = begin_s - self._start_s
        latency.token_s += [end_s - self._start_s] * (self.num_tokens - len(latency.token_s))
