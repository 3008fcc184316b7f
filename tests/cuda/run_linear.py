"""Checks and times the CUDA linear and moe_experts on this machine's GPU: `python tests/cuda/run_linear.py`.

Writes $OUT/linear.json as it goes and leaves out what it already holds. KDTREE_LINEAR_SO names a library built before;
QUICK=1 makes a few small checks and no timing, for compute-sanitizer; LIMIT_S seconds after the start no more cells are
timed. Exit code 1 if a check failed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from check_linear import check_linear
from check_moe_experts import check_moe
from linear_lib import Lib, Report
from time_linear import time_all


def main() -> int:
    """Runs everything; the exit code."""
    quick, limit_s = bool(os.environ.get("QUICK")), float(os.environ.get("LIMIT_S", "150"))
    report = Report(Path(os.environ.get("OUT", ".")) / "linear.json")
    lib = Lib()
    report.say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, library ready")
    torch.backends.cuda.matmul.allow_tf32 = False
    for name, check in (("linear_checks", check_linear), ("moe_checks", check_moe)):
        if name not in report.record:
            report.record[name] = check(lib, report, quick)
            report.say(f"{name}: {report.record[name]} made, {len(report.failures)} failures in all")
            report.save()
    if not quick:
        time_all(lib, report, limit_s)
    report.say(f"FAILED: {len(report.failures)}" if report.failures else "all checks passed")
    return bool(report.failures)


if __name__ == "__main__":
    sys.exit(main())
