"""Metrics of generations: tokens per target forward, acceptance by depth and by rank, seconds per step, speedup.

tau is tokens per target forward, the bonus token included; a text's last step counts, though its end may cut it short.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

from kdtree_nb.speculate.stats import Generation, StepRecord

Calls = Sequence[Generation | Sequence[Generation]]
"""What calls of `generate_ddtree` or `generate_ar` returned: a Generation, or a list of those decoded together."""

BOOKKEEPING = ("build", "accept", "compact")


@dataclasses.dataclass(frozen=True)
class Metrics:
    """Of all texts together, unless said otherwise. NaN, or None, where there is nothing to divide.

    tau:                 tokens per target forward of a stream, pooled over all steps
    tau_mean:            the mean of the texts' own
    nodes_per_step:      tree nodes verified, the root included
    accepted_by_depth:   d = 1 …: share of steps that accept at least d drafted tokens
    acceptance_by_depth: d = 1 …: of the steps that accept d - 1, the share that accepts the next one too
    accepted_by_rank:    rank 0 …: share of the accepted nodes that are their parent's best child, second, …
    seconds_per_step:    draft, verify, bookkeeping (build, accept, compact), of all streams of a call together
    tokens_per_s:        without the prefill
    speedup:             tokens_per_s over that of AR decoding
    efficiency:          speedup over tau: 1 where a step of DDTree takes no longer than one of AR
    """

    num_texts: int
    num_tokens: int
    num_steps: int
    tau: float
    tau_mean: float
    nodes_per_step: float
    accepted_by_depth: list[float]
    acceptance_by_depth: list[float]
    accepted_by_rank: list[float] | None
    seconds_per_step: dict[str, float]
    tokens_per_s: float
    speedup: float | None = None
    efficiency: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; a NaN is None."""
        return {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in dataclasses.asdict(self).items()
        }


def summarize(calls: Calls, ar: Calls | None = None, ranks: RankCounter | None = None) -> Metrics:
    """Metrics of `calls`. ar: the same texts without a drafter, for the speedup; ranks: what watched the calls."""
    texts = [generation for call in calls for generation in _as_list(call)]
    accepted = [count for text in texts for count in text.stats.accepted_per_step]
    num_tokens, num_steps = sum(text.stats.num_tokens for text in texts), len(accepted)
    by_depth = accepted_by_depth(accepted)
    tau = num_tokens / num_steps if num_steps else math.nan
    rate, ar_rate = tokens_per_s(calls), tokens_per_s(ar) if ar else None
    speedup = rate / ar_rate if ar_rate else None
    return Metrics(
        num_texts=len(texts),
        num_tokens=num_tokens,
        num_steps=num_steps,
        tau=tau,
        tau_mean=statistics.fmean(text.stats.tokens_per_step for text in texts if text.stats.nodes_per_step)
        if num_steps else math.nan,
        nodes_per_step=sum(sum(text.stats.nodes_per_step) for text in texts) / num_steps if num_steps else math.nan,
        accepted_by_depth=by_depth,
        acceptance_by_depth=[now / before for before, now in zip([1.0, *by_depth], by_depth, strict=False)],
        accepted_by_rank=ranks.shares() if ranks else None,
        seconds_per_step=seconds_per_step(calls),
        tokens_per_s=rate,
        speedup=speedup,
        efficiency=None if speedup is None else speedup / tau,
    )  # fmt: skip


def accepted_by_depth(accepted: Sequence[int]) -> list[float]:
    """Share of the steps, each with its number of accepted tokens, that accept at least 1, 2, … of them."""
    return [
        sum(count >= depth for count in accepted) / len(accepted) for depth in range(1, max(accepted, default=0) + 1)
    ]


def decode_s(call: Generation | Sequence[Generation]) -> dict[str, float]:
    """Seconds of a call for drafting, verifying and bookkeeping; the prefill is left out."""
    seconds = _as_list(call)[0].stats.seconds
    bookkeeping = sum(seconds[stage] for stage in BOOKKEEPING)
    return {"draft": seconds["draft"], "verify": seconds["verify"], "bookkeeping": bookkeeping}


def seconds_per_step(calls: Calls) -> dict[str, float]:
    """Mean seconds of a step's parts; on a GPU that takes whole steps, verify holds nearly all."""
    num_steps = sum(max(text.stats.num_target_forwards for text in _as_list(call)) for call in calls)
    parts = [decode_s(call) for call in calls]
    names = ("draft", "verify", "bookkeeping")
    return {name: sum(part[name] for part in parts) / num_steps if num_steps else math.nan for name in names}


def tokens_per_s(calls: Calls) -> float:
    """Tokens per second of all calls, one after the other, without their prefill."""
    num_tokens = sum(text.stats.num_tokens for call in calls for text in _as_list(call))
    seconds = sum(sum(decode_s(call).values()) for call in calls)
    return num_tokens / seconds if seconds else math.nan


def _as_list(call: Generation | Sequence[Generation]) -> Sequence[Generation]:
    return [call] if isinstance(call, Generation) else call


class RankCounter:
    """An `on_step` that counts which of its parent's children each accepted node is: rank 0 is the best."""

    def __init__(self) -> None:
        self.counts: collections.Counter[int] = collections.Counter()

    def __call__(self, record: StepRecord) -> None:
        for stream, path in zip(record.stream_ids, record.accepted_path, strict=True):
            self.counts.update(sibling_ranks(record.tree.parent[stream].tolist(), path))

    def shares(self) -> list[float]:
        """Share of the accepted nodes with rank 0, 1, …"""
        total = sum(self.counts.values())
        return [self.counts[rank] / total for rank in range(max(self.counts, default=-1) + 1)]


def sibling_ranks(parent: Sequence[int], path: Sequence[int]) -> list[int]:
    """For every node of a path, how many children of its parent come before it in best-first order."""
    return [list(parent[:node]).count(parent[node]) for node in path]
