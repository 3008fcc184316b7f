"""Every operation through the C ABI in a Python that has no torch, against numpy: `run_without_torch.py [cpu|cuda]`.

Also: rows are the same bits alone as in a batch, and bad arguments are errors. With cuda: streams, a CUDA graph of the
caller's, and memory of the wrong kind.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

sys.modules["torch"] = None  # an import of it anywhere is an error
sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np  # noqa: E402

from kdtree_nb.errors import KdtreeError  # noqa: E402
from kdtree_nb.kdtr import Bf16  # noqa: E402
from kdtree_nb.native import capi  # noqa: E402
from tests.capi.cases import DTYPES, Cases  # noqa: E402
from tests.capi.oracles import ORACLES, assert_matches, results_of  # noqa: E402


def expect_error(kind: type[Exception], text: str, function, *positional, **arguments) -> None:
    try:
        function(*positional, **arguments)
    except kind as error:
        assert text in str(error), f"expected {text!r} in {error}"
    else:
        raise AssertionError(f"expected {kind.__name__}: {text}")


def bits(value):
    return value.bits if isinstance(value, Bf16) else value.view(np.uint32)


def row(value, t: int):
    return Bf16(value.bits[t : t + 1]) if isinstance(value, Bf16) else value[t : t + 1]


def check_rows_alone(cases: Cases) -> None:
    """A row of linear is the same bits alone as among others."""
    arguments = cases["linear"]
    together = bits(cases.library.linear(**arguments, device=cases.device))
    for t in range(len(together)):
        one = arguments | {name: row(arguments[name], t) for name in ("x", "residual")}
        assert np.array_equal(bits(cases.library.linear(**one, device=cases.device))[0], together[t]), f"row {t}"


def check_refusals(cases: Cases) -> None:
    """The arguments are refused before a kernel sees them."""
    library, device = cases.library, cases.device
    flat = np.zeros(3, np.float32)
    expect_error(ValueError, "argmax: logits: expected shape", library.argmax, logits=flat, device=device)
    tree = cases["tree_build"] | {"max_budget": 4096}
    expect_error(ValueError, "max_budget: expected 0 to 1023, got 4096", library.tree_build, **tree, device=device)
    elsewhere = capi.Device(device.kind, 99)
    expect_error((ValueError, KdtreeError), "device: expected", library.argmax, **cases["argmax"], device=elsewhere)


class Gpu:
    """Memory and calls of one GPU stream, by pointer."""

    def __init__(self, library: capi.Library, device: capi.Device) -> None:
        self.library, self.device = library, ctypes.byref(device.struct())

    def new(self, num_bytes: int) -> int:
        address = ctypes.c_void_p()
        self.library.check(self.library.raw.kdtree_malloc(self.device, num_bytes, ctypes.byref(address)))
        return address.value

    def copy(self, to: int, source: int, num_bytes: int) -> None:
        self.library.check(self.library.raw.kdtree_copy(self.device, to, source, num_bytes))
        self.library.check(self.library.raw.kdtree_synchronize(self.device))

    def call(self, op: str, **fields) -> None:
        args = self.library.ops[op].struct(**fields)
        self.library.check(getattr(self.library.raw, f"kdtree_{op}")(ctypes.byref(args), self.device))


def check_wrong_memory(library: capi.Library) -> None:
    """Memory of the host on a GPU and the reverse, too much of it, no workspace; and all is well afterwards."""
    gpu, cpu = Gpu(library, capi.Device("cuda")), Gpu(library, capi.CPU)
    host, there = np.zeros(64, np.float32), gpu.new(256)
    sizes = {"num_rows": 1, "vocab_size": 8}
    expect_error(ValueError, "logits: expected memory of the GPU", gpu.call, "argmax", logits=host.ctypes.data, **sizes)
    expect_error(ValueError, "logits: expected memory of the host", cpu.call, "argmax", logits=there, **sizes)
    expect_error(ValueError, "copy: expected memory of the host", cpu.copy, host.ctypes.data, there, 256)
    expect_error(MemoryError, "malloc: CUDA error", gpu.new, 1 << 45)
    topk = {"logits": there, "log_probs": there, "token_ids": there, "num_candidates": 2, **sizes}
    expect_error(ValueError, "draft_topk: workspace: expected the address", gpu.call, "draft_topk", **topk)
    gpu.copy(there, host.ctypes.data, 256)
    gpu.call("argmax", logits=there, token=there + 128, **sizes)
    library.check(library.raw.kdtree_free(gpu.device, there))


def on_new_stream(library: capi.Library) -> capi.Device:
    struct = capi.Device("cuda").struct()
    library.check(library.raw.kdtree_create_stream(ctypes.byref(struct)))
    return capi.Device("cuda", 0, struct.stream)


def check_stream(cases: Cases) -> None:
    """On a stream of its own an operation gives the bits of the default stream."""
    there = Cases(cases.library, on_new_stream(cases.library), cases.dtype)
    for op in ("verify_attn", "moe_experts", "tree_build", "draft_topk"):
        for one, other in zip(results_of(cases, op, cases[op]), results_of(there, op, there[op]), strict=True):
            assert np.array_equal(one, other), op
    struct = there.device.struct()
    cases.library.check(cases.library.raw.kdtree_destroy_stream(ctypes.byref(struct)))
    assert struct.stream is None


def check_graph(library: capi.Library) -> None:
    """A call is captured in the caller's CUDA graph, and each launch reads what its memory holds by then."""
    driver, device = ctypes.CDLL("libcuda.so.1"), on_new_stream(library)
    gpu, stream = Gpu(library, device), ctypes.c_void_p(device.stream)
    logits, token = gpu.new(4 * 8), gpu.new(8)
    fields = {"logits": logits, "token": token, "num_rows": 1, "vocab_size": 8}
    graph, launchable = ctypes.c_void_p(), ctypes.c_void_p()
    assert driver.cuStreamBeginCapture_v2(stream, 0) == 0
    gpu.call("argmax", **fields)
    assert driver.cuStreamEndCapture(stream, ctypes.byref(graph)) == 0
    assert driver.cuGraphInstantiateWithFlags(ctypes.byref(launchable), graph, ctypes.c_ulonglong(0)) == 0
    for largest in (5, 2):
        values, found = np.eye(8, dtype=np.float32)[largest], np.full(1, -7)
        gpu.copy(logits, values.ctypes.data, values.nbytes)
        assert driver.cuGraphLaunch(launchable, stream) == 0
        gpu.copy(found.ctypes.data, token, 8)
        assert found[0] == largest


def main() -> None:
    device = capi.Device(sys.argv[1] if len(sys.argv) > 1 else "cpu")
    library = capi.load()
    assert device.kind == "cpu" or not library.build.no_cuda, library.build.no_cuda
    info = library.device_info(device)
    assert info.has_kernels == 1 and library.num_devices(device.kind) >= 1
    for dtype in DTYPES:
        cases = Cases(library, device, dtype)
        for op in ORACLES:
            assert_matches(cases, op)
        check_rows_alone(cases)
        if device.kind == "cuda":
            check_stream(cases)
    check_refusals(cases)
    if device.kind == "cuda":
        check_wrong_memory(library)
        check_graph(library)
    where = f"{info.name.decode()} (sm_{info.arch})"
    print(f"{len(ORACLES)} operations in {' and '.join(DTYPES)}: ok on {where}, no torch")


if __name__ == "__main__":
    main()
