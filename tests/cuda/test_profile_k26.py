"""The csv text of ncu becomes a record. Needs no GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import profile_k26

COLUMNS = ["ID", "Kernel Name", "gpu__time_duration.sum", *profile_k26.COLUMNS.values()]
COLUMNS += [f"{profile_k26.STALL}{why}{profile_k26.STALL_END}" for why in ("barrier", "wait", "long_scoreboard")]


def text(*rows: list[str], unit: str = "ns") -> list[str]:
    units = ["", "", unit, "%", "%", "", "", "", "", ""]
    return ["==PROF== connected", *(",".join(f'"{cell}"' for cell in row) for row in (COLUMNS, units, *rows))]


def kernel(name: str, ns: str, stalls: tuple[str, str, str]) -> list[str]:
    return ["0", name, ns, "43.5", "15", "1,024", "0.5", *stalls]


def test_kernels_of_each_step():
    rows = [
        kernel("unnamed>::tree_rows_kernel(Args)", "4,352", ("9", "1", "2")),
        kernel("void f<b::C<1>, 2>(d::E)", "900", ("1", "2", "3")),
        kernel("unnamed>::tree_rows_kernel(Args)", "5000", ("1", "9", "2")),
    ]
    first, second, third = profile_k26.measurements(text(*rows))
    assert first.name == third.name == "ncu/tree_rows_kernel" and second.name == "ncu/f<C<1>, 2>"
    assert first.samples == [pytest.approx(4.352e-6)] and second.params["blocks"] == 1024
    places = [(m.params["rows"], m.params["place"]) for m in (first, second, third)]
    assert places == [(1, 0), (1, 1), (16, 0)]
    assert list(second.params["stalls"].items()) == [("long_scoreboard", 3.0), ("wait", 2.0)]


@pytest.mark.parametrize("lines", [[], ["no csv"], text(unit="us"), ['"a","b"', '"",""']])
def test_other_text_is_refused(lines):
    with pytest.raises(ValueError, match="profile_k26: expected the raw page of ncu with durations in ns"):
        profile_k26.measurements(lines)
