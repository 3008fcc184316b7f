"""Runs the sanitizer cases of one kernel on this machine's GPU: `python tests/cuda/sanitize_case.py LIBRARY CASE`.

Without torch, whose allocator hides accesses outside a tensor: every array is its own allocation, and outputs are not
written before the kernel does. They are read back whole, so that initcheck sees what a kernel left out.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass

import numpy as np
from op_structs import args_type, workspace_ops
from sanitize_forms import Case, Out
from sanitize_list import CASES


@dataclass
class Array:
    """Device memory of a shape and type, freed with the object."""

    lib: ctypes.CDLL
    shape: tuple[int, ...]
    dtype: np.dtype

    def __post_init__(self) -> None:
        self.pointer = ctypes.c_void_p()
        self.num_bytes = int(np.prod(self.shape)) * self.dtype.itemsize
        check(self.lib, self.lib.kd_alloc(ctypes.byref(self.pointer), ctypes.c_size_t(max(1, self.num_bytes))))

    def put(self, values: np.ndarray) -> Array:
        """Copies from the host."""
        values = np.ascontiguousarray(values)
        check(self.lib, self.lib.kd_put(self.pointer, values.ctypes.data_as(ctypes.c_void_p), self.num_bytes))
        return self

    def get(self) -> np.ndarray:
        """A copy on the host."""
        values = np.empty(self.shape, self.dtype)
        check(self.lib, self.lib.kd_get(values.ctypes.data_as(ctypes.c_void_p), self.pointer, self.num_bytes))
        return values

    def free(self) -> None:
        """Gives the memory back."""
        check(self.lib, self.lib.kd_free(self.pointer))


def open_library(path: str) -> ctypes.CDLL:
    """The library with its types set."""
    lib = ctypes.CDLL(path)
    lib.kd_error.restype = ctypes.c_char_p
    for name in ("kd_put", "kd_get"):
        getattr(lib, name).argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    for op in workspace_ops():
        getattr(lib, f"bytes_{op}").restype = ctypes.c_int64
    return lib


def check(lib: ctypes.CDLL, status: int) -> None:
    """Raises RuntimeError unless a call to the runtime returned 0."""
    if status:
        raise RuntimeError(f"CUDA runtime: expected status 0, got {status}: {lib.kd_error().decode()}")


def fill(lib: ctypes.CDLL, case: Case) -> tuple[ctypes.Structure, dict[str, Array]]:
    """The struct of a case and its arrays by field."""
    args, arrays = args_type(case.op)(), {}
    for name, value in case.fields.items():
        if isinstance(value, np.ndarray):
            arrays[name] = Array(lib, value.shape, value.dtype).put(value)
        elif isinstance(value, Out):
            arrays[name] = Array(lib, value.shape, np.dtype(value.dtype))
        setattr(args, name, arrays[name].pointer if name in arrays else value)
    if case.op in workspace_ops():
        num_bytes = getattr(lib, f"bytes_{case.op}")(ctypes.byref(args))
        arrays["workspace"] = Array(lib, (num_bytes,), np.dtype(np.uint8))
        args.workspace = arrays["workspace"].pointer
        if hasattr(args, "workspace_bytes"):
            args.workspace_bytes = num_bytes
    return args, arrays


def run(lib: ctypes.CDLL, case: Case) -> dict[str, np.ndarray]:
    """Launches the kernels of a case; its outputs. Raises RuntimeError on any status but 0, ValueError on a NaN."""
    args, arrays = fill(lib, case)
    if case.shape is None:
        status = getattr(lib, f"run_{case.op}")(ctypes.byref(args), None)
    else:
        status = lib.kd_linear(ctypes.byref(args), case.shape, None)
    if status:
        raise RuntimeError(f"{case.name}: expected status 0, got {status}: {lib.kd_error().decode()}")
    check(lib, lib.kd_wait())
    outputs = {name: arrays[name].get() for name, value in case.fields.items() if isinstance(value, Out)}
    for array in arrays.values():
        array.free()
    for name, values in outputs.items():
        if case.fields[name].is_finite and np.isnan(as_float(values)).any():
            raise ValueError(f"{case.name}: {name}: expected numbers, got NaN")
    return outputs


def as_float(values: np.ndarray) -> np.ndarray:
    """BF16 lies in 16-bit words."""
    return (values.astype(np.uint32) << 16).view(np.float32) if values.dtype == np.uint16 else values


def main() -> None:
    """Runs every form of one case name; prints each as it begins, and how many there were."""
    lib = open_library(sys.argv[1])
    cases = CASES[sys.argv[2]](lib)
    for case in cases:
        print(case.name, flush=True)  # the last one that is named did not end
        run(lib, case)
    print(f"{sys.argv[2]}: {len(cases)} forms: {', '.join(case.name for case in cases)}", flush=True)


if __name__ == "__main__":
    main()
