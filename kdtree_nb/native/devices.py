"""What torch knows of the devices: their names, which GPUs the kernels run on, and that memory is too little."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from kdtree_nb.errors import DeviceMemoryError
from kdtree_nb.native.cuda_toolchain import MIN_ARCH

_SIGNS = ("DefaultCPUAllocator", "Storage size calculation overflowed")
"""What torch's RuntimeErrors say where the CPU's memory, or a 64-bit number of bytes, is exceeded."""


def why_not_on(device: torch.device) -> str:
    """Why the kernels cannot run on one GPU of this process, with the remedy; empty if they can."""
    count = torch.cuda.device_count()
    index = torch.cuda.current_device() if device.index is None and count else device.index or 0
    if index >= count:
        return f"expected a GPU below cuda:{count}, the number that torch sees. Check CUDA_VISIBLE_DEVICES."
    major, minor = torch.cuda.get_device_capability(index)
    if 10 * major + minor >= MIN_ARCH:
        return ""
    name = torch.cuda.get_device_name(index)
    return (
        f"expected sm_{MIN_ARCH} (Hopper) or newer, got {name}, which is sm_{major}{minor}. Choose another GPU with "
        "CUDA_VISIBLE_DEVICES, or device='cpu'."
    )


@contextlib.contextmanager
def memory_for(what: str, device: torch.device, remedy: str) -> Iterator[None]:
    """Turn torch's out-of-memory errors into a DeviceMemoryError: `what` is "operation: expected memory for …".

    What was allocated inside is free again once the error is handled; the device and the process stay usable.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and not any(sign in str(error) for sign in _SIGNS):
            raise
        raise DeviceMemoryError(f"{what}; {_free(device)}. {remedy}") from error


def _free(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{device} has less free than this process may take"
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_allocated(device)
    return (
        f"{device} has {free / 2**30:.1f} of {total / 2**30:.1f} GiB free, and this process's tensors hold "
        f"{held / 2**30:.1f} GiB"
    )


def put(to: torch.Tensor, values: np.ndarray | Sequence[float]) -> torch.Tensor:
    """Copy `values` from the host into `to`, in the order of its device's stream and without waiting for it."""
    host = torch.as_tensor(values, dtype=to.dtype, device="cpu")  # whatever the default device is
    return to.copy_(host.pin_memory() if to.is_cuda else host, non_blocking=True)


def device_label(device: str | torch.device = "cpu") -> str:
    """Name of the hardware that measurements run on, for labels: GPU name, or CPU model with its thread count."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{_cpu_name()}, {threads} thread{'s' if threads != 1 else ''}"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return " ".join(line.split(":", 1)[1].replace("(R)", "").replace("(TM)", "").split())
    return platform.processor() or platform.machine()
