"""Where benchmarks of a GPU take place: how a sample is taken, and what the device can do at most."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kdtree_nb.bench.runner import Effort, Measurement, Sample, clock, compete, rate

Calls = Sequence[Callable[[], object]]
"""The same work on different data, so that no call finds its data in a cache."""

MIN_SAMPLE_S = 4e-4
"""A graph repeats its calls until it takes at least this long."""

MAX_SAMPLE_S = 2e-2
"""A graph leaves calls out rather than take much longer than this."""

_COPY_BYTES = 2**31
_MATMUL_DIMS = {torch.bfloat16: 8192, torch.float32: 4096}


class Replay:
    """A CUDA graph of calls, one after the other. Each call of it replays the graph once: device seconds per call."""

    def __init__(self, calls: Calls) -> None:
        for call in calls[:2]:
            call()
        self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        seconds = self._timed(calls[-1])
        most = max(1, math.ceil(MAX_SAMPLE_S / seconds))
        self.num_calls = min(most, len(calls) * math.ceil(MIN_SAMPLE_S / seconds / len(calls)))
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for i in range(self.num_calls):
                calls[i % len(calls)]()
        self.graph.replay()

    def _timed(self, function: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        self.begin.record()
        function()
        self.end.record()
        self.end.synchronize()
        return self.begin.elapsed_time(self.end) * 1e-3

    def __call__(self) -> float:
        """Seconds per call."""
        return self._timed(self.graph.replay) / self.num_calls


def synchronized(function: Callable[[], object]) -> Sample:
    """Samples wall seconds of a call that works on the host and the GPU, from idle to idle."""

    def call() -> None:
        function()
        torch.cuda.synchronize()

    def sample() -> float:
        torch.cuda.synchronize()
        return clock(call)

    return sample


def graphed(function: Callable[[], None]) -> Callable[[], None]:
    """What replays the device work of `function` as one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # what `function` reads may still be being written
    with torch.cuda.stream(stream):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


class Lab:
    """A device; how to sample its work (`sample`) and that of host and device (`wall`), and how to repeat work without
    Python (`capture`); and the device's ceilings.

    floor_s of an operation is the time that its bytes take at the measured copy bandwidth, or its operations at the
    measured matmul rate of its dtype, whichever is longer.
    """

    def __init__(
        self, device: str | torch.device = "cuda", sample: Callable[[Calls], Sample] = Replay,
        wall: Callable[[Callable[[], object]], Sample] = synchronized,
        capture: Callable[[Callable[[], None]], Callable[[], None]] = graphed, num_rounds: int = Effort().num_rounds,
        copy_bytes: int | None = None, matmul_dims: Mapping[torch.dtype, int] | None = None,
    ) -> None:  # fmt: skip
        self.device, self.sample, self.wall, self.capture = torch.device(device), sample, wall, capture
        self.num_rounds = num_rounds
        self.copy_bytes, self.matmul_dims = copy_bytes or _COPY_BYTES, matmul_dims or _MATMUL_DIMS

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Normal random numbers on the device."""
        return torch.empty(shape, device=self.device, dtype=dtype).normal_()

    @functools.cached_property
    def bandwidth(self) -> Measurement:
        """Bytes per second of a copy by a kernel, read plus written (a graph's copy node is a third slower)."""
        source = self.randn(self.copy_bytes // 4)
        target = torch.empty_like(source)
        sample = self.sample([lambda: torch.mul(source, 1.0, out=target)] * 2)
        (measured,) = compete("bandwidth", {"copy": sample}, self.num_rounds)
        return rate(measured, 2 * self.copy_bytes, "byte/s", "bytes")

    @functools.cached_property
    def matmuls(self) -> dict[torch.dtype, Measurement]:
        """Operations per second of a large matmul on random data, by dtype (float32 without TF32)."""
        return {dtype: self._matmul(dtype, dim) for dtype, dim in self.matmul_dims.items()}

    def _matmul(self, dtype: torch.dtype, dim: int) -> Measurement:
        a, b = (self.randn(dim, dim).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        sample = self.sample([lambda: torch.mm(a, b, out=out)] * 2)
        (measured,) = compete("matmul", {"torch": sample}, self.num_rounds, {"dtype": dtype_name(dtype), "dim": dim})
        return rate(measured, 2 * dim**3, "flop/s", "flops")

    def floor_s(self, num_bytes: float, flops: float, dtype: torch.dtype) -> float:
        """Seconds below which the device cannot go."""
        return max(num_bytes / self.bandwidth.median, flops / self.matmuls[dtype].median)

    def work(self, num_bytes: float, flops: float, dtype: torch.dtype) -> dict[str, Any]:
        """The params `dtype`, `bytes`, `flops` and `floor_s` of a measurement."""
        floor_s = self.floor_s(num_bytes, flops, dtype)
        return {"dtype": dtype_name(dtype), "bytes": int(num_bytes), "flops": int(flops), "floor_s": floor_s}

    def compete(
        self, group: str, contenders: Mapping[str, Calls], effort: Effort, params: Mapping[str, Any]
    ) -> list[Measurement]:
        """Device work by turns: each contender is a list of calls."""
        samples = {name: self.sample(calls) for name, calls in contenders.items()}
        return compete(group, samples, effort.num_rounds, params)


def dtype_name(dtype: torch.dtype) -> str:
    """Its name in params: float32, bfloat16."""
    return str(dtype).removeprefix("torch.")


def bandwidth(lab: Lab, effort: Effort) -> list[Measurement]:
    """Bytes per second of a copy by a kernel, read and written bytes counted."""
    return [lab.bandwidth]


def matmul(lab: Lab, effort: Effort) -> list[Measurement]:
    """Floating-point operations per second of torch's square matmul on random data, in BF16 and FP32."""
    return list(lab.matmuls.values())
