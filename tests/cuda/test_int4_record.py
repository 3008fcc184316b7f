"""What run_int4.py reports becomes a record: names, units, what is judged. Needs no GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kdtree_nb.bench import judge
from kdtree_nb.bench.device_targets import targets_of

sys.path.insert(0, str(Path(__file__).parent))
import int4_record

LINEAR = {
    "floor": 17.5,
    "matmul": 70.0,
    "int4pack_mm": 44.0,
    "ours": 28.0,
    "chosen": "4-2",
    "early": True,
    "shapes": {},
}
EXPERTS = {"active": 8.0, "bytes": 2e8, "floor": 47.0, "ours": 78.0, "up": {}, "down": {}}


def judged(found: dict) -> dict[str, tuple[float, bool]]:
    verdicts = judge(targets_of("cuda"), int4_record.measurements(found))
    return {verdict.target.group: (verdict.got, verdict.met) for verdict in verdicts}


def test_a_report_is_judged():
    found = {"times": {"18432 7168 1": LINEAR}, "experts": {"7168 2048 1": EXPERTS}, "checks": 9, "failures": []}
    assert judged(found) == {
        "int4_linear": (pytest.approx(44 / 28), True), "int4_experts": (pytest.approx(78 / 47), True),
        "int4_checks": (0, True),
    }  # fmt: skip
    first = int4_record.measurements(found)[0]
    assert (first.name, first.samples) == ("int4_linear/torch BF16", [pytest.approx(7e-5)])
    assert first.params["bytes"] == 18432 * 7168 * 9 // 16 and first.params["M"] == 1


def test_what_failed_or_was_not_timed():
    assert judged({"checks": 9, "failures": ["a", "b"]}) == {"int4_checks": (2, False)}
    slow = {"times": {"7168 18432 16": LINEAR | {"ours": 45.0}}, "experts": {"7168 256 8": EXPERTS}}
    assert judged(slow)["int4_linear"] == (pytest.approx(44 / 45), False)
    assert "int4_experts" not in judged(slow)  # of one rank's part nothing is claimed
