"""Times of device work: medians of CUDA graph replays, each graph holding several calls over different data."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch


def graph_times(calls: list[Callable[[], object]], replays: int = 7) -> list[float]:
    """Seconds of one call, for each of `replays` replays of a graph that holds all `calls`."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3 / len(calls))
    return times


def graph_time(calls: list[Callable[[], object]], replays: int = 7) -> float:
    """Median seconds of one call."""
    return statistics.median(graph_times(calls, replays))


def copy_bandwidth(num_bytes: int = 1 << 31) -> float:
    """Bytes per second of a copy by a kernel, read plus written (a graph's copy node is a third slower)."""
    source = torch.randn(num_bytes // 4, device="cuda")
    target = torch.empty_like(source)
    return 2 * num_bytes / graph_time([lambda: torch.mul(source, 1.0, out=target)] * 2)


def matmul_rate(size: int = 8192) -> float:
    """BF16 operations per second of a large matrix product on random data."""
    a, b = (torch.randn(size, size, device="cuda").bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / graph_time([lambda: torch.mm(a, b, out=out)] * 3)
