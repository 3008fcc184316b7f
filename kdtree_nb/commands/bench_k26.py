"""bench k26: one tensor-parallel rank of Kimi K2.6 at its true dimensions, with random weights made on the device."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kdtree_nb.bench import Effort
    from kdtree_nb.bench.runner import Group

HELP = "one rank of Kimi K2.6 at its true dimensions: steps of 1 to 64 rows behind prefixes of 1k to 128k"
EPILOG = """No checkpoint is read: weights are random, INT4 experts among them, and made on the device. A rank of eight
takes about 100 GB of memory. Random weights send random tokens to about as many experts as chance would: the worst
case. What all ranks would take together is a projection from one, with --reduce-us assumed for each sum over ranks.
Where there is no GPU: kdtree-nb bench k26 --device cpu --small --layers 2"""

_SWITCHES = ("small", "quick", "check")


def add_parser(commands: argparse._SubParsersAction) -> None:
    """The parser of `bench k26`."""
    parser = commands.add_parser(
        "k26", help=HELP, description=f"{HELP[0].upper()}{HELP[1:]}.", epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="what to measure (default: cuda)")
    parser.add_argument(
        "--tp-rank-of", type=int, default=8, metavar="N", help="how many ranks share the model; one is run (default: 8)"
    )
    parser.add_argument("--layers", type=int, metavar="N", help="only the first N layers")
    parser.add_argument("--small", action="store_true", help="the same structure in narrow layers, for a CPU")
    parser.add_argument("--rows", type=int, nargs="+", metavar="N", help="rows of a step (default: 1 … 64)")
    parser.add_argument("--prefix", type=int, nargs="+", metavar="N", help="lengths of the prefix (default: 1k … 128k)")
    parser.add_argument("--reduce-us", type=float, metavar="US", help="assumed for one sum over ranks (default: 10)")
    parser.add_argument("--quick", action="store_true", help="few samples of few sizes: to see that everything runs")
    parser.add_argument("--out", type=Path, help="record to write: .json file (default: in data/benchmarks)")
    parser.add_argument("--check", action="store_true", help="exit with status 1 if a target is missed")


def groups(args: argparse.Namespace) -> tuple[dict[str, Group], Effort]:
    """The groups that the options ask for, and how much they may do. Raises ValueError on sizes that do not fit."""
    from kdtree_nb import bench
    from kdtree_nb.bench import k26

    effort = bench.Effort.quick() if args.quick else bench.Effort(num_rounds=k26.NUM_ROUNDS)
    if args.rows or args.prefix:  # whoever names sizes wants them all
        effort = dataclasses.replace(effort, every=1)
    given = {"rows": args.rows, "prefix_lens": args.prefix, "reduce_us": args.reduce_us}
    plan = k26.Plan.published(args.tp_rank_of, args.layers, args.small, **given)
    return k26.k26_groups(k26.k26_lab(args.device, effort), plan), effort


def is_partial(args: argparse.Namespace) -> bool:
    """Whether less was asked for than a record in data/benchmarks is to hold."""
    return bool(args.quick or args.small or args.layers or args.rows or args.prefix or args.device == "cpu")


def record_path(device: str) -> Path:
    """Where a complete record goes: beside the other records of the device."""
    from kdtree_nb.bench.record import slug
    from kdtree_nb.native.devices import device_label
    from kdtree_nb.viz.records import BENCHMARKS

    return BENCHMARKS / f"{slug(device_label(device))}-k26.json"


def command(args: argparse.Namespace) -> str:
    """The command as typed, without the place of the record."""
    values: Mapping[str, object] = {
        "--device": args.device, "--tp-rank-of": args.tp_rank_of, "--layers": args.layers, "--rows": args.rows,
        "--prefix": args.prefix, "--reduce-us": args.reduce_us,
    }  # fmt: skip
    words = ["kdtree-nb", "bench", "k26"]
    for name, value in values.items():
        if value is not None:
            words += [name, *map(str, value if isinstance(value, list) else [value])]
    return shlex.join(words + [f"--{name}" for name in _SWITCHES if getattr(args, name)])
