"""CudaGraph: what a function launches on a GPU, captured once and launched again with one call."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import torch

Result = TypeVar("Result")

_capturing = threading.Lock()


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A graph that the collector happened to free here would be an illegal call in the middle of the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class CudaGraph(Generic[Result]):
    """The kernels and copies that `function()` launches, and its `result`, whose tensors every `replay` fills again.

    They read whatever the tensors that `function` read hold by then; `function` is kept, with what it refers to. It
    must not wait for the GPU: that is an error of the capture. Memory that it allocates and lets go is taken from
    `pool` (`torch.cuda.graph_pool_handle()`); graphs that share one must not run at the same time. Other threads may go
    on launching. An exception of `function` passes through, and nothing is captured.
    """

    def __init__(self, function: Callable[[], Result], device: torch.device, pool: tuple[int, int]) -> None:
        self._function = function
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with _capturing, _no_garbage_collection(), torch.cuda.stream(stream):
            self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                self.result = function()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # a capture that failed cannot end well
                    self._graph.capture_end()
                raise
            self._graph.capture_end()

    def replay(self) -> None:
        """Launch everything again on the current stream, without waiting for it."""
        self._graph.replay()
