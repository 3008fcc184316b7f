"""Small work of torch on a CPU, kept on the calling thread."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def on_this_thread() -> Iterator[None]:
    """In the block torch computes on the calling thread alone; afterwards its number of threads is what it was.

    Torch's OpenMP threads wait for each other: beside other work on two cores, an operation of microseconds that is
    split among them takes milliseconds.
    """
    num_threads = torch.get_num_threads()
    if num_threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
