"""bench: measure this machine and keep the raw samples as a record."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kdtree_nb.commands import bench_k26, common

if TYPE_CHECKING:
    from kdtree_nb.bench import Effort, Failure, Measurement
    from kdtree_nb.bench.runner import Group
    from kdtree_nb.parallel import TensorParallel

HELP = "measure this machine and record raw samples in data/benchmarks/"
EPILOG = """A quick or partial run writes a record only where --out says so.
OMP_NUM_THREADS and OPENBLAS_NUM_THREADS set the number of threads. KDTREE_COMMIT names the commit where there is no git
folder. The record is written even if a group fails; then the status is 1."""

_WORK = ("bytes", "flops", "floor_s")
"""Params that are not printed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--device", choices=("cpu", "cuda"), help="what to measure (default: cpu)")
    parser.add_argument("--quick", action="store_true", help="few and short samples: to see that everything runs")
    parser.add_argument("--group", action="append", metavar="NAME", help="only this group (may be repeated)")
    parser.add_argument("--list", action="store_true", help="list the groups and exit")
    parser.add_argument("--out", type=Path, help="record to write: .json file, or folder (default: data/benchmarks)")
    parser.add_argument("--check", action="store_true", help="exit with status 1 if a target is missed")
    parser.add_argument("--judge", type=Path, metavar="RECORD", help="only a table of what a record reaches")
    bench_k26.add_parser(parser.add_subparsers(dest="what", metavar="[k26]", title="at true dimensions"))


def run(args: argparse.Namespace) -> int:
    """Measure, write the record, print the medians and what the targets came to. Status 1 if a group failed."""
    from kdtree_nb import bench
    from kdtree_nb.viz.records import BENCHMARKS

    if args.what == "k26":
        return run_k26(args)
    if args.judge:
        return run_judge(args)
    args.device = args.device or "cpu"
    groups = bench.GROUPS if args.device == "cpu" else bench.cuda_groups(bench.Lab(args.device))
    if args.list:
        for name, group in groups.items():
            print(f"{name:18}{' '.join((group.__doc__ or '').split()).partition('. ')[0].rstrip('.')}")
        return 0
    unknown = sorted(set(args.group or ()) - set(groups))
    if unknown:
        raise ValueError(f"--group: expected names of {', '.join(groups)}, got {', '.join(unknown)}")
    chosen = {name: group for name, group in groups.items() if not args.group or name in args.group}
    target = args.out or (None if args.quick or args.group else BENCHMARKS)
    effort = bench.Effort.quick() if args.quick else bench.Effort()
    return _report(args, *measure(chosen, effort, target, command(args), args.device))


def run_judge(args: argparse.Namespace) -> int:
    """`bench --judge`. With --check status 1 if a target is missed, or a group failed in the recorded run."""
    from kdtree_nb import bench
    from kdtree_nb.viz.records import load_record

    given = {
        "--device": args.device,
        "--quick": args.quick,
        "--group": args.group,
        "--list": args.list,
        "--out": args.out,
    }
    useless = ", ".join(name for name, value in given.items() if value)
    if useless:
        raise ValueError(f"{useless}: expected without --judge, which measures nothing. Leave out one or the other.")
    record = load_record(args.judge)
    targets = bench.targets_of(record.device_kind)
    verdicts = bench.judge(targets, record.results)
    if not verdicts:
        groups = sorted({r.name.partition("/")[0] for r in record.results})
        raise ValueError(
            f"--judge: {args.judge}: expected results that a target of {record.device_kind} is about, of "
            f"{', '.join(sorted({t.group for t in targets}))}, got {', '.join(groups)}"
        )
    print(bench.markdown_table(verdicts), end="")
    for failure in record.failed:
        print(f"FAILED  {failure}")
    return int(args.check and (bool(record.failed) or not all(v.met for v in verdicts)))


def run_k26(args: argparse.Namespace) -> int:
    """`bench k26`. Status 1 if a group failed."""
    import torch

    from kdtree_nb.native import require

    args.device = args.device or "cuda"
    if args.device == "cuda":
        require(torch.device("cuda"))
    bench_k26.expect_options(args)
    target = bench_k26.target(args)
    if args.tp is not None:
        return common.end_of_rank(args.device, lambda: _run_k26_ranks(args, target))
    groups, effort = bench_k26.groups(args)
    return _report(args, *measure(groups, effort, target, bench_k26.command(args), args.device))


def _run_k26_ranks(args: argparse.Namespace, target: Path | None) -> int:
    """As one of all ranks; the first writes and prints. What fails on one rank ends all."""
    from kdtree_nb.parallel import Patience

    kind = args.device
    with common.started(args, Patience(bench_k26.START_S, bench_k26.EXCHANGE_S)) as ranks:
        groups, effort = bench_k26.groups_of_ranks(args, ranks)
        args.device = kind
        measurements, failures = measure(groups, effort, target, bench_k26.command(args), kind, ranks)
        if ranks.rank == 0:
            bench_k26.print_projection(args, measurements)
    return _report(args, measurements, failures) if ranks.rank == 0 else 0


def _report(args: argparse.Namespace, measurements: Sequence[Measurement], failures: Sequence[Failure]) -> int:
    """Print what was measured, the targets and the failures; the exit status."""
    print_table(measurements)
    missed = print_targets(measurements, args.device)
    for failure in failures:
        print(f"FAILED  {failure.group}: {failure.reason}")
    return int(bool(failures) or args.check and missed)


def measure(
    groups: Mapping[str, Group], effort: Effort, target: Path | None, words: str, device: str,
    ranks: TensorParallel | None = None,
) -> tuple[list[Measurement], list[Failure]]:  # fmt: skip
    """Run the groups; the record is written after each that measured something, so that this is kept whatever comes.

    words: the command that the record names
    ranks: those that run the groups together. The first writes; a group that fails on one is raised there
    """
    import torch

    from kdtree_nb import bench
    from kdtree_nb.native import require

    if device == "cuda" or ranks:
        require(torch.device(device))
    failures: list[Failure] = []
    path, is_first = None, ranks is None or ranks.rank == 0
    if target and is_first:
        _expect_place(target)

    def keep(measurements: list[Measurement]) -> None:
        nonlocal path
        if target and is_first and measurements:
            record = bench.make_record(measurements, words, device, failures)
            record = bench_k26.of_ranks(record, ranks.num_ranks) if ranks else record
            path = bench.write_record(record, target)
        if device == "cuda":
            torch.cuda.empty_cache()

    try:
        with contextlib.nullcontext() if ranks else _terminable():
            measurements = bench.run_groups(groups, effort, is_first, failures, keep, goes_on=ranks is None)
    finally:  # also where it is interrupted
        if path:
            print(f"record: {path}")
    return measurements, failures


def _expect_place(target: Path) -> None:
    """Raises ValueError where no record could be written."""
    from kdtree_nb.kdtr import expect_writable

    is_file = target.suffix == ".json"
    expect_writable(target.parent if is_file else target)
    if is_file and target.is_dir():
        raise ValueError(f"--out: expected a .json file or a folder of another name, got the folder {target}")


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM, as of a limit of time, ends what runs inside like Ctrl-C: what was measured is still written. Only the
    main thread hears of signals; in another nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def command(args: argparse.Namespace) -> str:
    """The command as typed, without the place of the record."""
    words = ["kdtree-nb", "bench", *(["--device", args.device] if args.device != "cpu" else [])]
    words += ["--quick"] if args.quick else []
    return shlex.join(words + [word for name in args.group or () for word in ("--group", name)])


def print_table(measurements: Sequence[Measurement]) -> None:
    """One line per measurement: name, params, median and, for times, the ratio to the first contender of its group, and
    to the floor where there is one."""
    first: dict[tuple[str, str], float] = {}
    for m in measurements:
        group, _, contender = m.name.partition("/")
        params = " ".join(f"{name}={value}" for name, value in m.params.items() if name not in _WORK)
        ratio = first.setdefault((group, params), m.median) / m.median
        faster = f"{ratio:8.2f}x" if m.unit == "s" and ratio != 1 else " " * 9
        floor = f" {m.median / m.params['floor_s']:6.2f} floor" if "floor_s" in m.params else ""
        print(f"{group:20} {contender:20} {_quantity(m.median, m.unit):>14} {faster}{floor}  {params}")


def print_targets(measurements: Sequence[Measurement], device: str) -> bool:
    """One line per target of the device that was measured. Whether one was missed."""
    from kdtree_nb import bench

    verdicts = bench.judge(bench.targets_of(device), measurements)
    for v in verdicts:
        word = "ok" if v.met else "MISSED"
        cells = f", {v.num_met} of {v.num_cells} cells" if v.num_cells > 1 else ""
        bound = f"{v.got:.3g} of {v.target.bound:g} {v.target.unit}"
        print(f"{word:6}  {v.target.claim}: {bound} ({v.target.group}{cells})")
    return not all(v.met for v in verdicts)


def _quantity(value: float, unit: str) -> str:
    if unit in ("row", "token", "expert"):
        return f"{value:g} {unit}s"
    scales = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")) if unit == "s" else ((1e9, f"G{unit}"), (1e6, f"M{unit}"))
    scale, name = next(((s, n) for s, n in scales if value >= s), scales[-1])
    return f"{value / scale:.3g} {name}"
