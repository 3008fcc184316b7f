"""Measure from outside: warm up, interleave the contenders, keep every raw sample."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

_MIN_SAMPLE_S = 1e-3


def measure(function: Callable[[], object], repeats: int = 7, warm_up: int = 2) -> list[float]:
    """Raw samples, seconds per call: `repeats` of them after `warm_up` unrecorded calls."""
    return compare({"": function}, repeats, warm_up)[""]


def compare(
    functions: Mapping[str, Callable[[], object]], repeats: int = 7, warm_up: int = 2
) -> dict[str, list[float]]:
    """Raw samples per name, seconds per call, taken in rounds (a, b, a, b, ...) so that drift hits all alike.

    A call shorter than a millisecond is repeated inside a sample until it lasts that long, and divided. On a machine
    with a GPU each sample ends with a synchronisation.
    """
    if repeats < 1 or warm_up < 1:
        raise ValueError(f"compare: expected repeats and warm_up of at least 1, got {repeats} and {warm_up}")
    calls = {}
    for name, function in functions.items():
        for _ in range(warm_up):
            duration = _time(function, 1)
        calls[name] = max(1, round(_MIN_SAMPLE_S / max(duration, 1e-9)))
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            samples[name].append(_time(function, calls[name]))
    return samples


def speedup(samples: Mapping[str, Sequence[float]], baseline: str, contender: str) -> float:
    """How many times faster `contender` is than `baseline`: the ratio of median seconds."""
    for name in (baseline, contender):
        if name not in samples:
            raise ValueError(f"speedup: expected one of {sorted(samples)}, got {name!r}")
    return statistics.median(samples[baseline]) / statistics.median(samples[contender])


def _time(function: Callable[[], object], calls: int) -> float:
    _synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        function()
    _synchronize()
    return (time.perf_counter() - start) / calls


def _synchronize() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
