"""Checks and times linear and moe_experts with INT4 weights on this machine's GPU: `python tests/cuda/run_int4.py`.

Writes $OUT/int4.json as it goes and leaves out what it already holds. KDTREE_LINEAR_SO names a library built before;
QUICK=1 makes a few small checks and no timing, for compute-sanitizer; LIMIT_S seconds after the start no more cells are
timed. Exit code 1 if a check failed. The tile shapes that use Hopper's wgmma are tried first in another process, and
left out if that fails or hangs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from check_int4 import check_int4, check_wgmma
from linear_lib import Lib, Report
from time_int4 import time_all


def try_wgmma(folder: Path) -> int:
    """What the other process does; the exit code."""
    report = Report(folder / "int4_wgmma.json")
    check_wgmma(Lib(), report)
    report.save()
    return bool(report.failures)


def wgmma_works(library: str, seconds: float = 45) -> bool:
    """Whether the other process ends in time without a failure."""
    try:
        environment = {**os.environ, "KDTREE_LINEAR_SO": library}
        return subprocess.run([sys.executable, __file__, "wgmma"], timeout=seconds, env=environment).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def main() -> int:
    """Runs everything; the exit code."""
    quick, limit_s = bool(os.environ.get("QUICK")), float(os.environ.get("LIMIT_S", "80"))
    report = Report(Path(os.environ.get("OUT", ".")) / "int4.json")
    lib = Lib()
    if torch.cuda.get_device_capability()[0] == 9 and not wgmma_works(lib.c._name):
        lib.skip = frozenset(shape.index for shape in lib.int4_shapes() if shape.name.startswith("w "))
        report.fail("the shapes that use wgmma: left out")
    report.say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, library ready")
    if "checks" not in report.record:
        report.record["checks"] = check_int4(lib, report, quick)
        report.say(f"{report.record['checks']} checks made, {len(report.failures)} failures")
        report.save()
    if not quick:
        time_all(lib, report, limit_s)
    report.say(f"FAILED: {len(report.failures)}" if report.failures else "all checks passed")
    return bool(report.failures)


if __name__ == "__main__":
    sys.exit(try_wgmma(Path(os.environ.get("OUT", "."))) if sys.argv[1:] == ["wgmma"] else main())
