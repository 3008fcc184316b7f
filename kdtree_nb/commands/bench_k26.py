"""bench k26: Kimi K2.6 at its true dimensions, one tensor-parallel rank or all, with random weights."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kdtree_nb.bench import Effort, Measurement
    from kdtree_nb.bench.k26 import Plan
    from kdtree_nb.bench.runner import Group
    from kdtree_nb.parallel import TensorParallel
    from kdtree_nb.viz.records import Record

HELP = "Kimi K2.6 at its true dimensions, one rank or all: steps of 1 to 64 rows behind prefixes of 1k to 128k"
EPILOG = """No checkpoint is read: weights are random, INT4 experts among them, and made on the device. A rank of eight
takes about 100 GB of memory. Random weights send random tokens to about as many experts as chance would: the worst
case. What all ranks would take together is a projection from one, with --reduce-us assumed for each sum over ranks.
All of them, on eight GPUs: torchrun --nproc-per-node 8 -m kdtree_nb bench k26 --tp 8
Where there is no GPU: kdtree-nb bench k26 --device cpu --small --layers 2"""

NUM_RANKS = 8
"""Of which one is run unless --tp-rank-of says otherwise."""

_SWITCHES = ("small", "quick", "check")

START_S, EXCHANGE_S = 300.0, 60.0
"""How long a rank that is alive may take to build its share, and to come to an exchange, before the others give it up.
One that is gone they notice in seconds."""


def add_parser(commands: argparse._SubParsersAction) -> None:
    """The parser of `bench k26`."""
    parser = commands.add_parser(
        "k26", help=HELP, description=f"{HELP[0].upper()}{HELP[1:]}.", epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    of_bench = argparse.SUPPRESS  # of options that may also stand before `k26`
    parser.add_argument("--device", choices=("cpu", "cuda"), help="what to measure (default: cuda)", default=of_bench)
    ranks = parser.add_mutually_exclusive_group()
    ranks.add_argument(
        "--tp-rank-of", type=int, metavar="N", help=f"how many ranks share the model; one is run (default: {NUM_RANKS})"
    )
    ranks.add_argument("--tp", type=int, metavar="N", help="run all N ranks, which torchrun has started")
    parser.add_argument(
        "--projection", type=Path, metavar="RECORD",
        help="with --tp: a record of one rank to compare with (default: the device's in data/benchmarks, if any)",
    )  # fmt: skip
    parser.add_argument("--layers", type=int, metavar="N", help="only the first N layers")
    parser.add_argument("--small", action="store_true", help="the same structure in narrow layers, for a CPU")
    parser.add_argument("--rows", type=int, nargs="+", metavar="N", help="rows of a step (default: 1 … 64)")
    parser.add_argument("--prefix", type=int, nargs="+", metavar="N", help="lengths of the prefix (default: 1k … 128k)")
    parser.add_argument("--reduce-us", type=float, metavar="US", help="assumed for one sum over ranks (default: 10)")
    text = "few samples of few sizes: to see that everything runs"
    parser.add_argument("--quick", action="store_true", help=text, default=of_bench)
    text = "record to write: .json file, or folder (default: in data/benchmarks)"
    parser.add_argument("--out", type=Path, help=text, default=of_bench)
    parser.add_argument(
        "--check", action="store_true", help="exit with status 1 if a target is missed", default=of_bench
    )


def expect_options(args: argparse.Namespace) -> None:
    """Raises ValueError for options that would have no effect, and where the record to compare with is none of a rank:
    before anything is measured."""
    given = {"--group": args.group, "--list": args.list, "--judge": args.judge}
    useless = ", ".join(name for name, value in given.items() if value)
    if useless:
        raise ValueError(f"{useless}: expected without k26, which has groups of its own. Leave out one or the other.")
    if args.projection and args.tp is None:
        raise ValueError("--projection: expected --tp N beside it, got one rank, which makes a projection itself")
    if args.tp is not None:
        _one_rank(args)


def groups(args: argparse.Namespace) -> tuple[dict[str, Group], Effort]:
    """The groups that the options ask for, and how much they may do. Raises ValueError on sizes that do not fit."""
    from kdtree_nb.bench import k26

    effort, plan = _effort(args), _plan(args, _rank_of(args))
    return k26.k26_groups(k26.k26_lab(args.device, effort), plan), effort


def groups_of_ranks(args: argparse.Namespace, ranks: TensorParallel) -> tuple[dict[str, Group], Effort]:
    """The same for all ranks together. Raises ValueError also where there are not --tp of them."""
    from kdtree_nb.bench import all_ranks, k26

    if ranks.num_ranks != args.tp:
        raise ValueError(
            f"--tp: expected the number of processes that torchrun has started, {ranks.num_ranks}, got {args.tp}"
        )
    effort, plan = _effort(args), _plan(args, args.tp)
    ranks.agree("bench k26 (options)", repr((plan, effort)))
    return all_ranks.all_ranks_groups(k26.k26_lab(str(ranks.device), effort), plan, ranks), effort


def _rank_of(args: argparse.Namespace) -> int:
    return NUM_RANKS if args.tp_rank_of is None else args.tp_rank_of


def _effort(args: argparse.Namespace) -> Effort:
    from kdtree_nb import bench
    from kdtree_nb.bench import k26_cell

    effort = bench.Effort.quick() if args.quick else bench.Effort(num_rounds=k26_cell.NUM_ROUNDS)
    if args.rows or args.prefix:  # whoever names sizes wants them all
        effort = dataclasses.replace(effort, every=1)
    return effort


def _plan(args: argparse.Namespace, num_ranks: int) -> Plan:
    from kdtree_nb.bench import k26

    given = {"rows": args.rows, "prefix_lens": args.prefix, "reduce_us": args.reduce_us}
    return k26.Plan.published(num_ranks, args.layers, args.small, **given)


def is_partial(args: argparse.Namespace) -> bool:
    """Whether less was asked for than a record in data/benchmarks is to hold."""
    return bool(args.quick or args.small or args.layers or args.rows or args.prefix or args.device == "cpu")


def target(args: argparse.Namespace) -> Path | None:
    """Where the record goes: to --out, under the record's own name in a folder; if complete, beside other records."""
    if args.out is None:
        return None if is_partial(args) else record_path(args)
    return args.out if args.out.suffix == ".json" else args.out / record_path(args).name


def record_path(args: argparse.Namespace) -> Path:
    """Of a complete record, beside the other records of the device; its name tells the number of ranks."""
    return _beside(args, f"-tp{args.tp}" if args.tp else _of_one_rank(_rank_of(args)))


def _of_one_rank(num_ranks: int) -> str:
    return "" if num_ranks == NUM_RANKS else f"-rank-of-{num_ranks}"


def _beside(args: argparse.Namespace, ending: str) -> Path:
    from kdtree_nb.bench.record import slug
    from kdtree_nb.native.devices import device_label
    from kdtree_nb.viz.records import BENCHMARKS

    return BENCHMARKS / f"{slug(device_label(args.device))}-k26{ending}.json"


def of_ranks(record: Mapping[str, Any], num_ranks: int) -> dict[str, Any]:
    """A record of num_ranks equal devices."""
    import torch

    exchange = {"NCCL": ".".join(map(str, torch.cuda.nccl.version()))} if record["device_kind"] == "cuda" else {}
    device, versions = f"{num_ranks} × {record['device']}", {**record["versions"], **exchange}
    return {**record, "device": device, "versions": versions}


def _one_rank(args: argparse.Namespace) -> Record | None:
    """The record of one rank to compare with; None where none was named and none lies beside the others. Raises
    ValueError for one that cannot be read, or has steps of which no projection can be made."""
    from kdtree_nb.viz import k26
    from kdtree_nb.viz.records import load_record

    path = args.projection or _beside(args, _of_one_rank(args.tp))
    if not args.projection and not path.is_file():
        return None
    record = load_record(path)
    k26.projections([], record.results)
    return record


def print_projection(args: argparse.Namespace, measurements: Sequence[Measurement]) -> None:
    """How far the projection from one rank's record, where there is one, was off."""
    from kdtree_nb.viz import k26

    record = _one_rank(args)
    if record is None:
        name = _beside(args, _of_one_rank(args.tp)).name
        print(f"projection: none to compare with, as there is no record {name} of one rank")
        return
    found = k26.projections(measurements, record.results)
    if found:
        print(f"projection: {k26.told_source(record.results)}")
    else:
        print(f"projection: {record.path.name} has no steps of one of these ranks, by layers, rows and prefix")
    for p in found:
        print(
            f"projection  {p.rows:3d} rows behind {p.prefix_len:7,d}: measured {1e3 * p.measured_s:.3f} ms; projected "
            f"{1e3 * p.assumed_s:.3f} ms with sums assumed ({p.assumed_error:+.1%}), {1e3 * p.with_exchange_s:.3f} ms "
            f"with the exchanges as measured alone ({p.with_exchange_error:+.1%})"
        )


def command(args: argparse.Namespace) -> str:
    """The command as typed, without the place of the record."""
    values: Mapping[str, object] = {
        "--device": args.device, "--tp" if args.tp else "--tp-rank-of": args.tp or _rank_of(args),
        "--layers": args.layers, "--rows": args.rows, "--prefix": args.prefix, "--reduce-us": args.reduce_us,
    }  # fmt: skip
    words = ["kdtree-nb", "bench", "k26"]
    if args.tp:
        words = ["torchrun", "--nproc-per-node", str(args.tp), "-m", "kdtree_nb", "bench", "k26"]
    for name, value in values.items():
        if value is not None:
            words += [name, *map(str, value if isinstance(value, list) else [value])]
    return shlex.join(words + [f"--{name}" for name in _SWITCHES if getattr(args, name)])
