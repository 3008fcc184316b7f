"""Capture: kernel calls recorded once, and repeated without the way through Python and the dispatcher.

On a CPU it is what a CUDA graph is on a GPU: the same kernels on the same memory, whose contents may have changed.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Generic, TypeVar

from kdtree_nb.errors import KdtreeError
from kdtree_nb.native import build

Result = TypeVar("Result")


@functools.cache
def _library() -> ctypes.PyDLL:
    library = ctypes.PyDLL(str(build.load().path))
    library.kdtree_capture_new.restype = ctypes.c_void_p
    library.kdtree_capture_num_calls.restype = ctypes.c_int64
    for name in ("begin", "end", "replay", "num_calls", "free"):
        getattr(library, f"kdtree_capture_{name}").argtypes = [ctypes.c_void_p]
    return library


class Capture(Generic[Result]):
    """The kernel calls that `function()` makes on this thread, and its `result`.

    `replay` makes the same calls again: they read whatever the tensors that `function` read hold by now, and write into
    the tensors of `result`. Only `kdtree_nb.ops` other than tree_build are recorded; views are fine, other torch
    operations are not repeated. The caller keeps the tensors alive that `function` reads; `function` is kept, with what
    it refers to. An exception of `function` passes through, and nothing is captured.
    """

    def __init__(self, function: Callable[[], Result]) -> None:
        self._library = _library()
        self._function = function
        self._handle = self._library.kdtree_capture_new()
        try:  # around begin as well: Ctrl-C may come between any two lines, and must not leave this thread recording
            if self._library.kdtree_capture_begin(self._handle):
                raise KdtreeError("capture: expected no capture in progress on this thread, got one inside another")
            self.result = function()
        finally:
            self._library.kdtree_capture_end(self._handle)

    @property
    def num_calls(self) -> int:
        """Kernel calls that a replay makes."""
        return self._library.kdtree_capture_num_calls(self._handle)

    def replay(self) -> bool:
        """Make the calls again, on the thread's number of threads at capture. False if a kernel refused its inputs.

        Which one and why, `function` itself says when it is called with the same inputs.
        """
        return self._library.kdtree_capture_replay(self._handle) == 0

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.kdtree_capture_free(self._handle)
