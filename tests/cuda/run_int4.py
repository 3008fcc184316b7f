"""Checks and times linear and moe_experts with INT4 weights on this machine's GPU: `python tests/cuda/run_int4.py`.

A process of its own runs the steps, one tile shape of one case each, and says which before it runs. One that ends in a
step, or is silent for SILENCE_S and is killed, is a failure, and another goes on without that shape. Writes
$OUT/int4.json as it goes and leaves out what it already holds. KDTREE_LINEAR_SO names a library built before; QUICK=1
makes a few small checks and no timing, all in one process, for compute-sanitizer; LIMIT_S seconds after the start no
more cells are timed. Exit code 1 if a check failed.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from check_int4 import check_int4
from linear_lib import Lib
from processes import watch
from steps import Steps
from time_int4 import time_all

SILENCE_S = 40.0
"""A step takes a few seconds at most; to begin takes longer."""


def open_report() -> Steps:
    """The report, with what the file holds."""
    return Steps(Path(os.environ.get("OUT", ".")) / "int4.json")


def run_steps(lib: Lib, report: Steps, quick: bool, limit_s: float) -> None:
    """All checks, then the times, without what is broken."""
    broken = report.record.get("broken", [])
    lib.skip = frozenset(shape.index for shape in lib.int4_shapes() if shape.name in broken)
    check_int4(lib, report, quick)
    if not quick:
        time_all(lib, report, limit_s)
    report.finish()
    report.save()


def run_watched(library: str, limit_s: float) -> None:
    """Other processes, until one has taken all steps or two were stopped in the same."""
    start, going = time.monotonic(), True
    while going:
        left_s = max(0.0, limit_s - (time.monotonic() - start))
        environment = {**os.environ, "KDTREE_LINEAR_SO": library, "LIMIT_S": str(left_s), "PYTHONUNBUFFERED": "1"}
        code = watch([sys.executable, __file__, "steps"], SILENCE_S, environment)
        if code == 0:
            return
        why = f"no sign for {SILENCE_S:.0f} s" if code is None else f"its process ended with {code}"
        going = open_report().stop(why)


def main() -> int:
    """Runs everything; the exit code."""
    quick, limit_s = bool(os.environ.get("QUICK")), float(os.environ.get("LIMIT_S", "80"))
    lib, report = Lib(), open_report()
    report.say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, library ready")
    if quick or sys.argv[1:] == ["steps"]:
        run_steps(lib, report, quick, limit_s)
        if not quick:
            return 0  # the other process reads the report
    else:
        run_watched(lib.c._name, limit_s)
    report = open_report()
    report.say(f"{report.record.get('checks', 0)} checks made")
    report.say(f"FAILED: {len(report.failures)}" if report.failures else "all checks passed")
    return bool(report.failures)


if __name__ == "__main__":
    sys.exit(main())
