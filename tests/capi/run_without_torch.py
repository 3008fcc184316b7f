"""Every operation through the C ABI in a Python that has no torch, against numpy: `run_without_torch.py [cpu|cuda]`.

With cuda also: results in a CUDA graph of the caller's, rows that are the same bits alone as in a batch, and errors.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.modules["torch"] = None  # an import of it anywhere is an error
sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np  # noqa: E402

from kdtree_nb.errors import KdtreeError  # noqa: E402
from kdtree_nb.kdtr import Bf16  # noqa: E402
from kdtree_nb.native import capi  # noqa: E402
from tests.capi.cases import DTYPES, ORACLES, Cases, assert_matches  # noqa: E402


def expect_error(kind: type[Exception], text: str, function, **arguments) -> None:
    try:
        function(**arguments)
    except kind as error:
        assert text in str(error), f"expected {text!r} in {error}"
    else:
        raise AssertionError(f"expected {kind.__name__}: {text}")


def check_rows_alone(cases: Cases) -> None:
    """A row of linear is the same bits alone as among others."""
    arguments = cases["linear"]
    bits = lambda value: value.bits if isinstance(value, Bf16) else value.view(np.uint32)  # noqa: E731
    part = lambda value, t: Bf16(value.bits[t : t + 1]) if isinstance(value, Bf16) else value[t : t + 1]  # noqa: E731
    together = bits(cases.library.linear(**arguments, device=cases.device))
    for t in range(len(together)):
        one = arguments | {name: part(arguments[name], t) for name in ("x", "residual")}
        assert np.array_equal(bits(cases.library.linear(**one, device=cases.device))[0], together[t]), f"row {t}"


def check_refusals(cases: Cases) -> None:
    """The arguments are refused before a kernel sees them."""
    library, device = cases.library, cases.device
    expect_error(
        ValueError, "argmax: logits: expected shape", library.argmax, logits=np.zeros(3, np.float32), device=device
    )
    tree = cases["tree_build"] | {"max_budget": 4096}
    expect_error(ValueError, "max_budget: expected 0 to 1023, got 4096", library.tree_build, **tree, device=device)
    elsewhere = capi.Device(device.kind, 99)
    expect_error((ValueError, KdtreeError), "device: expected", library.argmax, **cases["argmax"], device=elsewhere)


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
    check_refusals(cases)
    where = f"{info.name.decode()} (sm_{info.arch})"
    print(f"{len(ORACLES)} operations in {' and '.join(DTYPES)}: ok on {where}, no torch")


if __name__ == "__main__":
    main()
