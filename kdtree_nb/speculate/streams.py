"""Streams: those that were submitted to an engine, who of them waits and who has a seat, and a turn of the loop."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable

import torch

from kdtree_nb.errors import QueueFullError
from kdtree_nb.speculate.batch import Batch
from kdtree_nb.speculate.handle import CLOSED, Handle
from kdtree_nb.speculate.stream import Stream


class Streams:
    """Continuous batching: streams join a batch and leave it while others run.

    A turn frees the seats of those that have finished, gives the free seats to those that wait, the first submitted
    first, prefills a chunk and takes one step of all that run. Any thread may take it; one does at a time. What calls
    in from inside a turn (a drafter, a signal handler) may submit, cancel and close, but takes no other turn.

    After an error or an interrupt the batch is thrown away. What was emitted is kept, and the streams go on from there
    in a new batch: a position's logits are the same bits whether a step or a prefill computed what lies before it.

    A seat has cache rows for the longest text, also while it is free: captured steps read each seat's where they lie.
    So who waits is let in as soon as any seat is free, however long the texts are, and none is put off for memory; but
    what free seats and short texts leave unused makes no further seat.

    open_batch:  makes an empty batch
    close_batch: takes one back that nobody is in
    """

    def __init__(
        self, open_batch: Callable[[], Batch], close_batch: Callable[[Batch], None], max_streams: int, max_waiting: int
    ) -> None:
        self.max_streams, self.max_waiting = max_streams, max_waiting
        self.is_closed, self._indices = False, itertools.count()
        self._open_batch, self._close_batch = open_batch, close_batch
        self._batch: Batch | None = None
        self._unfinished: list[Handle] = []  # changed in place, by one call: a signal handler may change it as well
        self._lock, self._is_turning = threading.RLock(), False

    def submit(self, stream: Stream, no_logits: torch.Tensor | None) -> Handle:
        """Take in a stream, and give it its index. Raises QueueFullError where no place is free."""
        with self._lock:
            if self.is_closed:
                raise ValueError(
                    "submit: expected an engine that is open, got one that was closed; make another Engine"
                )
            self._sweep()
            num_unfinished = sum(not handle.is_finished for handle in self._unfinished)
            if num_unfinished >= self.max_streams + self.max_waiting:
                raise QueueFullError(
                    f"submit: expected a free place, got {num_unfinished} unfinished streams (max_streams "
                    f"{self.max_streams}, max_waiting {self.max_waiting}); read a handle or take steps (engine.step()) "
                    "until one has finished, cancel one, or make the engine's max_waiting larger"
                )
            stream.index = next(self._indices)
            handle = Handle(self, stream, no_logits)
            self._unfinished.append(handle)
            return handle

    @torch.inference_mode()
    def step(self) -> bool:
        """A turn. Returns whether a stream is unfinished.

        An error that concerns one stream ends that one, whose handle raises it; any other is raised, and all streams
        stay as they are.
        """
        with self._lock:
            self._refuse_inside("step")
            self._sweep()
            if self._unfinished:
                try:
                    self._guarded_turn()
                finally:  # also where an interrupt came in front of that
                    self._is_turning = False
            self._sweep()
            return bool(self._unfinished)

    def wait_for(self, handle: Handle, num_tokens: int) -> None:
        """Take turns until `handle` has that many tokens or has finished."""
        is_done = False
        while not is_done:
            with self._lock:
                self._refuse_inside("read a handle")
                is_done = handle.is_finished or handle.num_tokens >= num_tokens
                if not is_done:
                    self.step()

    def _guarded_turn(self) -> None:
        self._is_turning = True
        try:
            self._turn()
        except BaseException as error:
            self._give_up(error)
        finally:
            self._is_turning = False

    def _refuse_inside(self, what: str) -> None:
        """Raises ValueError where this thread is in a turn, which another one would run into."""
        if self._is_turning:
            raise ValueError(
                f"{what}: expected no step of this engine in progress, got one inside another, as from a drafter or a "
                "signal handler; note there what is to be done, and do it behind the step"
            )

    def _turn(self) -> None:
        batch = self._batch or self._begin()
        if finished := [s for s in batch.streams if s.index >= 0 and s.committed.finish_reason]:
            batch.leave(finished)
        waiting = [h.stream for h in self._unfinished if h.stream.seat < 0]
        if waiting and batch.free_seats:
            batch.join(waiting[: len(batch.free_seats)])
        begin_s, before = time.perf_counter(), dict(batch.seconds)
        batch.advance()
        end_s = time.perf_counter()
        for handle in self._unfinished:
            stream = handle.stream
            if stream.seat >= 0 and not handle.is_finished:
                stream.add_seconds(before, batch.seconds)
                stream.commit()
                handle.stamp(begin_s, end_s)

    def _begin(self) -> Batch:
        """A new batch, which nobody is in yet."""
        for handle in self._unfinished:
            handle.stream.rollback()
        self._batch = self._open_batch()
        return self._batch

    def _give_up(self, error: BaseException) -> None:
        """Throw the batch away. Raises `error` unless it was one stream's own."""
        batch, self._batch = self._batch, None
        if batch is not None:
            batch.close()
        for handle in self._unfinished:
            handle.stream.rollback()
        if all(handle.stream.error is not error for handle in self._unfinished):
            raise error

    def _sweep(self) -> None:
        """Forget the streams that have finished; without any other the batch is given back. A turn does without."""
        if self._is_turning:
            return
        for handle in [handle for handle in self._unfinished if handle.is_finished]:
            handle.stream.cut()
            with contextlib.suppress(ValueError):  # a signal handler that ended another has swept, too
                self._unfinished.remove(handle)
        if not self._unfinished and self._batch is not None:
            batch, self._batch = self._batch, None
            batch.close()
            if not self.is_closed:
                self._close_batch(batch)

    def end(self, handle: Handle, reason: str) -> bool:
        """End a stream where it stands. False where it had finished by itself. What a turn in progress has done for it
        is dropped when that is over."""
        with self._lock:
            if handle.is_finished:
                return False
            if self._is_turning:
                handle.stream.committed = handle.stream.committed._replace(finish_reason=reason)
                return True
            if self._batch is None:
                handle.stream.rollback()
            handle.stream.finish_reason = reason
            handle.stream.commit()
            self._sweep()
            return True

    def close(self) -> None:
        """End all streams and take no more."""
        with self._lock:
            self.is_closed = True
            for handle in list(self._unfinished):
                self.end(handle, CLOSED)
