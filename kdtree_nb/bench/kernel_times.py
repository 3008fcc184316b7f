"""Device time by kernel of work on a GPU, as torch's profiler sees it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from kdtree_nb.bench.runner import BenchmarkError

REPEATS = 3
"""Profiled runs that are averaged."""


class KernelTime(NamedTuple):
    """One kernel in one run: its name without namespaces and arguments; how often it was launched; seconds on the
    device in all."""

    name: str
    launches: float
    seconds: float


def short_name(name: str) -> str:
    """`void a::(anonymous namespace)::f<b::C<(b::Kind)1>, 2>(d::E)` -> `f<C<1>, 2>`."""
    name = re.sub(r"\(anonymous namespace\)::|\b\w+::|^void ", "", name).replace(" >", ">")
    name = re.sub(r"\(\w+\)(?=\d)", "", name)  # enumerators, as casts of numbers
    depth = 0
    for at, char in enumerate(name):
        if char == "(" and depth == 0:
            return name[:at].strip()
        depth += (char == "<") - (char == ">")
    return name


def by_kernel(events: Iterable[tuple[str, int, float]], repeats: int) -> list[KernelTime]:
    """(name, count, seconds) of `repeats` runs -> per kernel of one run, the longest first."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, count, seconds in events:
        of_kernel = sums[short_name(name)]
        of_kernel[0] += count / repeats
        of_kernel[1] += seconds / repeats
    return sorted((KernelTime(name, *both) for name, both in sums.items()), key=lambda k: -k.seconds)


def kernel_times(run: Callable[[], object], device: torch.device) -> list[KernelTime]:
    """What `run` launches on a GPU; kernels of graphs count one by one. They may overlap, so their times can add up to
    more than a run takes. Raises BenchmarkError where the profiler sees no kernel."""
    run()
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(REPEATS):
            run()
        torch.cuda.synchronize(device)
    seen = [e for e in profiler.key_averages() if e.self_device_time_total > 0]
    if not seen:
        raise BenchmarkError("bench: kernel times: expected kernels on the GPU, and torch's profiler saw none")
    return by_kernel(((e.key, e.count, e.self_device_time_total * 1e-6) for e in seen), REPEATS)
