"""What a generation returns: the tokens, why it stopped, and what every step and stage cost."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from kdtree_nb.tree import DraftTree

STAGES = ("prefill", "draft", "build", "verify", "accept", "compact")
"""Stages of a generation that `GenerationStats.seconds` tells apart."""


@dataclasses.dataclass
class GenerationStats:
    """One stream's steps; `seconds` is shared by all streams of a batch, whose stages run together.

    num_prefill_forwards: target forwards spent on prompt[:-1], and after an interrupt on the whole text so far
    accepted_per_step:    drafted tokens emitted by each verify step (0 in AR decoding)
    nodes_per_step:       tree nodes verified in each step, the root included
    seconds:              stage -> seconds of the whole batch, as long as the stream was in it
    """

    num_prefill_forwards: int = 0
    accepted_per_step: list[int] = dataclasses.field(default_factory=list)
    nodes_per_step: list[int] = dataclasses.field(default_factory=list)
    num_tokens: int = 0
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def num_target_forwards(self) -> int:
        """Verify steps: target forwards after the prefill."""
        return len(self.nodes_per_step)

    @property
    def tokens_per_step(self) -> float:
        """Tokens emitted per target forward; NaN before the first."""
        return self.num_tokens / self.num_target_forwards if self.nodes_per_step else float("nan")


@dataclasses.dataclass(frozen=True)
class Generation:
    """The tokens that one prompt got.

    finish_reason: "length" (max_new_tokens), "eos" (the last token ends the text), "max_seq_len", or of a stream that
                   was submitted "cancelled" or "closed"
    logits:        f32 [len(tokens), V], the logits that each token was chosen from, where asked for
    """

    tokens: list[int]
    finish_reason: str
    stats: GenerationStats
    logits: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """One step as `on_step` sees it. S streams of the batch; those that have finished have num_nodes 0.

    stream_ids:    the streams that took part
    tree:          what was verified
    target_token:  i64 [S, N]  the target's choice after each node
    accepted_path: per taking-part stream, the accepted node indices, root excluded
    emitted:       per taking-part stream, the tokens emitted by this step
    """

    step: int
    stream_ids: list[int]
    tree: DraftTree
    target_token: torch.Tensor
    accepted_path: list[list[int]]
    emitted: list[list[int]]


def timed(stage: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a method so that its wall time is added to self.seconds[stage]."""

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(self: Any, *args: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(self, *args)
            finally:
                self.seconds[stage] += time.perf_counter() - start

        return run

    return decorate
