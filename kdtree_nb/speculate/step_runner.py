"""StepRunner: one kind of step, captured in a CUDA graph, and the records of its last runs on their way to the host."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch

from kdtree_nb.native import ops
from kdtree_nb.native.cuda_graph import CudaGraph
from kdtree_nb.speculate.device_step import Step

RING_SIZE = 8
"""Records that are kept; no more steps than that are ever in flight."""


class StepRunner:
    """`step(ring)` as a CUDA graph; on a CPU it is called. `result` is what the last run computed on the way.

    max_depth:    length of the longest accepted path
    pool:         see CudaGraph
    buffer:       what the host fills before a run, or None; kept here beside what reads it
    keeps_scores: whether the host may ask for the scores of the trees, too
    """

    def __init__(
        self, step: Callable[[ops.StepRing], Step], num_streams: int, max_depth: int, device: torch.device,
        pool: tuple[int, int] | None = None, buffer: object = None, keeps_scores: bool = False,
    ) -> None:  # fmt: skip
        self.buffer, self.pool, self._keeps_scores = buffer, pool, keeps_scores
        self._scores: dict[int, torch.Tensor] = {}
        shape = (RING_SIZE, len(ops.RECORD_FIELDS) + 1 + max_depth, num_streams)
        self.ring = ops.StepRing(
            torch.zeros(shape, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int64, device=device)
        )
        self._step, self._num_runs, self._graph = step, 0, None
        if device.type == "cuda":
            self._capture(device, pool)
        else:
            self._records = list(self.ring.records)

    def _capture(self, device: torch.device, pool: tuple[int, int] | None) -> None:
        """Run once, which loads every kernel, and capture. The caller sees to it that no stream is active."""
        self._step(self.ring)
        self.ring.step.zero_()
        self._graph = CudaGraph(functools.partial(self._step, self.ring), device, pool)
        self.result = self._graph.result
        records = torch.empty(self.ring.records.shape, dtype=torch.int64, device="cpu", pin_memory=True)
        self._records, self._on_device = list(records), list(self.ring.records)
        self._events = [torch.cuda.Event() for _ in range(RING_SIZE)]
        if self._keeps_scores:
            sizes = RING_SIZE, *self.result.tree.log_prob.shape
            scores = torch.empty(sizes, dtype=torch.float64, device="cpu", pin_memory=True)
            self._scores = dict(enumerate(scores))

    def launch(self, with_scores: bool = False) -> int:
        """Start a step and the copy of its record; returns the record's place in the ring.

        with_scores: the scores of its trees come along, for `scores`
        """
        place = self._num_runs % RING_SIZE
        self._num_runs += 1
        if self._graph is None:
            self.result = self._step(self.ring)
            if with_scores:
                self._scores[place] = self.result.tree.log_prob
            return place
        self._graph.replay()
        self._records[place].copy_(self._on_device[place], non_blocking=True)
        if with_scores:
            self._scores[place].copy_(self.result.tree.log_prob, non_blocking=True)
        self._events[place].record()
        return place

    def scores(self, place: int) -> np.ndarray:
        """log_prob f64 [S, N] of the trees of a step that has been waited for, and was launched with scores."""
        return self._scores[place].numpy()

    def wait(self, place: int) -> np.ndarray:
        """The record i64 [4 + 1 + L, S] of a step, as soon as it is there. It stays until the ring comes round."""
        if self._graph is not None:
            self._events[place].synchronize()
        return self._records[place].numpy()
