"""bench: measure this machine and keep the raw samples as a record."""

from __future__ import annotations

import argparse
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kdtree_nb.bench import Measurement

HELP = "measure this machine and record raw samples in data/benchmarks/"
EPILOG = """A quick or partial run writes a record only where --out says so.
OMP_NUM_THREADS and OPENBLAS_NUM_THREADS set the number of threads."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--quick", action="store_true", help="few and short samples: to see that everything runs")
    parser.add_argument("--group", action="append", metavar="NAME", help="only this group (may be repeated)")
    parser.add_argument("--list", action="store_true", help="list the groups and exit")
    parser.add_argument("--out", type=Path, help="record to write: .json file, or folder (default: data/benchmarks)")
    parser.add_argument("--check", action="store_true", help="exit with status 1 if a target is missed")


def run(args: argparse.Namespace) -> int:
    """Measure, write the record, print the medians and what the targets came to."""
    from kdtree_nb import bench
    from kdtree_nb.viz.records import BENCHMARKS

    if args.list:
        for name, group in bench.GROUPS.items():
            print(f"{name:16}{' '.join((group.__doc__ or '').split()).partition('. ')[0].rstrip('.')}")
        return 0
    unknown = sorted(set(args.group or ()) - set(bench.GROUPS))
    if unknown:
        raise ValueError(f"--group: expected names of {', '.join(bench.GROUPS)}, got {', '.join(unknown)}")
    groups = {name: group for name, group in bench.GROUPS.items() if not args.group or name in args.group}
    measurements = bench.run_groups(groups, bench.Effort.quick() if args.quick else bench.Effort())
    target = args.out or (None if args.quick or args.group else BENCHMARKS)
    print_table(measurements)
    missed = print_targets(measurements)
    if target:
        record = bench.make_record(measurements, command(args))
        print(f"record: {bench.write_record(record, target)}")
    return int(args.check and missed)


def command(args: argparse.Namespace) -> str:
    """The command as typed, without the place of the record."""
    words = ["kdtree-nb", "bench", *(["--quick"] if args.quick else [])]
    return shlex.join(words + [word for name in args.group or () for word in ("--group", name)])


def print_table(measurements: Sequence[Measurement]) -> None:
    """One line per measurement: name, params, median and, for times, the ratio to the first contender of its group."""
    first: dict[tuple[str, str], float] = {}
    for m in measurements:
        group, _, contender = m.name.partition("/")
        params = " ".join(f"{name}={value}" for name, value in m.params.items())
        median = statistics.median(m.samples)
        ratio = first.setdefault((group, params), median) / median
        faster = f"{ratio:8.2f}x" if m.unit == "s" and ratio != 1 else " " * 9
        print(f"{group:20} {contender:20} {_quantity(median, m.unit):>14} {faster}  {params}")


def print_targets(measurements: Sequence[Measurement]) -> bool:
    """One line per target that was measured. Whether one was missed."""
    from kdtree_nb import bench

    missed = [target for target, _ in bench.missed_targets(measurements)]
    for target in bench.TARGETS:
        ratio = bench.ratio(measurements, target.group, target.baseline, target.contender)
        if ratio is not None:
            verdict = "MISSED" if target in missed else "ok"
            print(f"{verdict:6}  {target.claim}: {ratio:.2f} of {target.at_least:g} ({target.group})")
    return bool(missed)


def _quantity(value: float, unit: str) -> str:
    scales = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")) if unit == "s" else ((1e9, f"G{unit}"), (1e6, f"M{unit}"))
    scale, name = next(((s, n) for s, n in scales if value >= s), scales[-1])
    return f"{value / scale:.3g} {name}"
