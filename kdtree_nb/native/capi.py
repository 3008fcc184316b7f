"""The C ABI from Python, without torch: numpy in, numpy out, on the CPU or a GPU.

    from kdtree_nb.native import capi
    library = capi.load()
    tree = library.tree_build(log_probs=…, token_ids=…, bonus=…, budget=…, max_budget=64)
    tree.parent, tree.num_nodes

Every operation of kernels/op_args.h is a method that takes its arrays, its sizes that no array shows and its scalars by
keyword, and `device=capi.Device("cuda")`; it allocates and returns the result, an array or a named tuple of arrays.
On a GPU it copies the arguments there and the results back; who keeps data there, or counts microseconds, calls the C
functions themselves (`library.raw`), as kernels/capi/kdtree.h describes. BF16 arrays are `kdtree_nb.kdtr.Bf16`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kdtree_nb.errors import KdtreeError, KernelBuildError, KernelUnavailableError
from kdtree_nb.native.capi_build import CapiBuild, build_capi
from kdtree_nb.native.capi_call import Call, bits_of
from kdtree_nb.native.capi_signatures import SIGNATURES
from kdtree_nb.native.capi_structs import Op, read_ops

ABI_VERSION = 3
"""Of the structs and functions that this module calls: KDTREE_ABI_VERSION of kdtree.h."""

KINDS = {"cpu": 0, "cuda": 1}
_VALUE_ERRORS = (1, 2, 3, 4, 5, 100)  # what is wrong with the arguments
_UNAVAILABLE, _OUT_OF_MEMORY = 101, 102


class _DeviceStruct(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("index", ctypes.c_int32), ("stream", ctypes.c_void_p)]


class DeviceInfo(ctypes.Structure):
    """kdtree_device_info: name (bytes), arch (90 for sm_90), has_kernels, num_multiprocessors, memory_bytes."""

    _fields_ = [
        ("name", ctypes.c_char * 256),
        ("arch", ctypes.c_int32),
        ("has_kernels", ctypes.c_int32),
        ("num_multiprocessors", ctypes.c_int32),
        ("memory_bytes", ctypes.c_int64),
    ]


@dataclasses.dataclass(frozen=True)
class Device:
    """Where an operation runs: "cpu", or "cuda" with the index of a GPU and a cudaStream_t (0: its default stream)."""

    kind: str = "cpu"
    index: int = 0
    stream: int = 0

    def struct(self) -> _DeviceStruct:
        """The C struct. Raises ValueError on an unknown kind or an impossible index."""
        if self.kind not in KINDS:
            raise ValueError(f"capi: device: expected the kind cpu or cuda, got {self.kind!r}")
        if not isinstance(self.index, int) or not 0 <= self.index < 1 << 31:
            raise ValueError(f"capi: device: expected an index of 0 to below 2^31, got {self.index!r}")
        return _DeviceStruct(KINDS[self.kind], self.index, self.stream or None)


CPU = Device()


@functools.cache
def load(kernels: Path | None = None, cache: Path | None = None) -> Library:
    """The library, compiled when the cache has none for these sources and this machine, and loaded once. Raises
    KernelBuildError."""
    return Library(build_capi(kernels, cache))


class Library:
    """The loaded C library.

    build: where it lies, and why it has no CUDA kernels if it has none
    raw:   the ctypes library, with argument types, for calls with pointers
    ops:   operations by name, with the ctypes classes of their structs
    """

    def __init__(self, build: CapiBuild) -> None:
        self.build = build
        remedy = f"Delete {build.path} and try again."
        try:
            self.raw = ctypes.CDLL(str(build.path))
        except OSError as error:
            raise KernelBuildError(f"C library: {build.path} does not load: {error}. {remedy}") from error
        self.ops = read_ops((build.kernels / "op_args.h").read_text(encoding="utf-8"))
        _declare(self.raw, self.ops)
        abi = self.raw.kdtree_abi_version()
        for op in self.ops.values():
            expected, found = ctypes.sizeof(op.struct), self.raw.kdtree_args_bytes(op.name.encode())
            if found != expected or abi != ABI_VERSION:
                raise KernelBuildError(
                    f"C library: {op.name}: expected ABI {ABI_VERSION} and a struct of {expected} bytes, "
                    f"got ABI {abi} and {found} bytes. {remedy}"
                )

    @property
    def version(self) -> str:
        """The version of the package that the library was built from."""
        return self.raw.kdtree_version().decode()

    def num_devices(self, kind: str) -> int:
        """How many devices of a kind there are. Raises KernelUnavailableError without CUDA kernels or a driver."""
        count = ctypes.c_int32()
        self.check(self.raw.kdtree_num_devices(Device(kind).struct().kind, ctypes.byref(count)))
        return count.value

    def device_info(self, device: Device) -> DeviceInfo:
        """Name, architecture and memory of a device."""
        info = DeviceInfo()
        self.check(self.raw.kdtree_get_device_info(ctypes.byref(device.struct()), ctypes.byref(info)))
        return info

    def check(self, status: int) -> None:
        """Raise what a status means: ValueError for bad arguments, KernelUnavailableError, MemoryError, KdtreeError."""
        if status == 0:
            return
        name = self.raw.kdtree_status_string(status).decode()
        message = f"{self.raw.kdtree_last_error().decode(errors='replace')} ({name})"
        kinds = {_UNAVAILABLE: KernelUnavailableError, _OUT_OF_MEMORY: MemoryError}
        raise (ValueError if status in _VALUE_ERRORS else kinds.get(status, KdtreeError))(message)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_") or name not in self.ops or name not in SIGNATURES:
            raise AttributeError(f"the C library has no operation {name!r}; it has {sorted(SIGNATURES)}")
        return functools.partial(self.call, name)

    def call(self, name: str, *, device: Device = CPU, **arguments: Any) -> Any:
        """Run an operation on numpy arrays; see the module. Raises ValueError on what does not fit together."""
        if not isinstance(device, Device):
            raise ValueError(f"{name}: device: expected a capi.Device, got {device!r}")
        signature, call = SIGNATURES[name], Call(self.ops[name], device.kind == "cpu", dict(arguments))
        with _Memory(self, device) as memory:
            for array in signature.inputs:
                setattr(call.args, array.name, memory.put(call.values.get(array.name)))
            results = {array.name: call.new(array) for array in signature.outputs}
            for field, value in results.items():
                setattr(call.args, field, memory.put(bits_of(value)))
            if "workspace" in call.op.pointers and device.kind != "cpu":
                self._give_workspace(call, memory)
            self.check(getattr(self.raw, f"kdtree_{name}")(ctypes.byref(call.args), memory.device))
            changed = [call.values[array.name] for array in signature.inputs if array.is_in_place]
            memory.get([*changed, *map(bits_of, results.values())])
        return call.result(results)

    def _give_workspace(self, call: Call, memory: _Memory) -> None:
        num_bytes = ctypes.c_int64()
        count = getattr(self.raw, f"kdtree_{call.op.name}_workspace_bytes")
        self.check(count(ctypes.byref(call.args), memory.device, ctypes.byref(num_bytes)))
        call.args.workspace = memory.new(num_bytes.value)
        if "workspace_bytes" in call.op.numbers:
            call.args.workspace_bytes = num_bytes.value


class _Memory:
    """The memory of one call: the arrays' own on the CPU, copies on a GPU, which live as long as the context."""

    def __init__(self, library: Library, device: Device) -> None:
        self._library = library
        self._struct = device.struct()
        self._copies: dict[int, int] = {}  # address of the host's array: address on the GPU
        self._owned: list[int] = []
        self.device = ctypes.byref(self._struct)

    def __enter__(self) -> _Memory:
        return self

    def __exit__(self, *error: object) -> None:
        for address in self._owned:  # a status here would only repeat the error of the call
            self._library.raw.kdtree_free(self.device, address)

    def new(self, num_bytes: int) -> int:
        """Address of new memory on the device."""
        address = ctypes.c_void_p()
        self._library.check(self._library.raw.kdtree_malloc(self.device, num_bytes, ctypes.byref(address)))
        self._owned.append(address.value)
        return address.value

    def put(self, array: np.ndarray | None) -> int | None:
        """Address of an array's values on the device; None for no array."""
        if array is None or self._struct.kind == KINDS["cpu"]:
            return None if array is None else array.ctypes.data
        address = self.new(array.nbytes)
        self._library.check(self._library.raw.kdtree_copy(self.device, address, array.ctypes.data, array.nbytes))
        self._copies[array.ctypes.data] = address
        return address

    def get(self, arrays: list[np.ndarray]) -> None:
        """Bring arrays that were put there back, when the work on the device is done."""
        if self._struct.kind != KINDS["cpu"]:
            for array in arrays:
                source = self._copies[array.ctypes.data]
                self._library.check(self._library.raw.kdtree_copy(self.device, array.ctypes.data, source, array.nbytes))
            self._library.check(self._library.raw.kdtree_synchronize(self.device))


def _declare(raw: ctypes.CDLL, ops: dict[str, Op]) -> None:
    """Argument and result types of the C functions; a status is an int32."""
    device, size, address = ctypes.POINTER(_DeviceStruct), ctypes.c_int64, ctypes.c_void_p
    for name in ("version", "status_string", "last_error"):
        getattr(raw, f"kdtree_{name}").restype = ctypes.c_char_p
    raw.kdtree_args_bytes.restype = size
    raw.kdtree_args_bytes.argtypes = [ctypes.c_char_p]
    raw.kdtree_malloc.argtypes = [device, size, ctypes.POINTER(address)]
    raw.kdtree_free.argtypes = [device, address]
    raw.kdtree_copy.argtypes = [device, address, address, size]
    for op in ops.values():
        args = ctypes.POINTER(op.struct)
        getattr(raw, f"kdtree_{op.name}").argtypes = [args, device]
        if "workspace" in op.pointers:
            getattr(raw, f"kdtree_{op.name}_workspace_bytes").argtypes = [args, device, ctypes.POINTER(size)]
