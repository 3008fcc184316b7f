"""calibrate: measure what steps cost on this machine, once, for `budget="auto"`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from kdtree_nb.commands import common

if TYPE_CHECKING:
    from kdtree_nb.speculate import CostModel

HELP = "measure what a step costs on this machine, for --budget auto"
EPILOG = """The cost model goes to calibration/ in the user's data folder: $KDTREE_DATA_DIR, else
$XDG_DATA_HOME/kdtree_nb, else ~/.local/share/kdtree_nb. It holds for one device (on a
CPU with its number of threads), model, dtype and build of the kernels; measure again after any of these has changed.

example:
  kdtree-nb calibrate --drafter ngram && kdtree-nb generate --budget auto --prompt 'def add(a, b):'"""

MAX_BUDGET = {"cpu": 64, "cuda": 256}
"""Largest tree that is measured unless told otherwise, by kind of device."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    common.add_model_arguments(parser)
    parser.add_argument(
        "--drafter", action="append", metavar="NAME",
        help="measured with it, as in `kdtree-nb generate`; may be repeated (default: ngram)",
    )  # fmt: skip
    parser.add_argument(
        "--max-budget", type=int, metavar="N", help="largest tree of a stream (default: 64 on a CPU, 256 on a GPU)"
    )
    parser.add_argument("--streams", type=int, nargs="+", metavar="S", help="texts at a time (default: 1 4 10)")
    parser.add_argument(
        "--prefix-len", type=int, nargs="+", metavar="N",
        help="lengths of text (default: those of 32 512 2048 that the model has room for)",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="samples of each point (default: 7)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where to write instead of the user's data folder")
    parser.add_argument("--json", action="store_true", help="print the cost model as JSON")


def run(args: argparse.Namespace) -> int:
    """Measure, keep the cost model, and print it."""
    from kdtree_nb.kdtr import expect_writable
    from kdtree_nb.speculate import calibrate, save_cost
    from kdtree_nb.speculate.cost_store import cost_key, cost_path
    from kdtree_nb.speculate.measure_cost import Effort

    model = common.load(args)
    given = {"num_streams": args.streams, "prefix_len": args.prefix_len}
    effort = Effort(
        max_budget=MAX_BUDGET[model.device.type] if args.max_budget is None else args.max_budget,
        num_rounds=args.rounds, **{name: tuple(values) for name, values in given.items() if values is not None},
    )  # fmt: skip
    named = [common.make_drafter(name) for name in args.drafter or ["ngram"]]
    drafters = [drafter for drafter in named if drafter is not None]
    expect_writable(cost_path(cost_key(model, "host"), args.out).parent)
    cost = calibrate(model, drafters, effort, show_progress=not args.json)
    path = save_cost(cost, args.out)
    print(json.dumps(cost.to_dict()) if args.json else _table(cost, path))
    return 0


def _table(cost: CostModel, path: Path) -> str:
    """Milliseconds of a forward by rows, for each number of streams, slots and length of text."""
    lines = [f"{cost.key.device}, {cost.key.dtype}, steps led by the {cost.key.kind}: milliseconds of a forward"]
    for surface in cost.surfaces:
        captured = f", captured with {surface.num_slots} slots each" if surface.num_slots else ""
        lines.append(f"streams {surface.num_streams}{captured}")
        lines.append(f"{'rows':>12} " + " ".join(f"{rows:>7}" for rows in surface.num_rows))
        for prefix_len, seconds in zip(cost.prefix_len, surface.seconds, strict=True):
            lines.append(f"{f'prefix {prefix_len}':>12} " + " ".join(f"{s * 1e3:>7.3f}" for s in seconds))
    for name, measured in cost.overhead.items():
        lines.append(f"{name}: milliseconds of a step besides, by length of text")
        for at in measured:
            where = f"streams {at.num_streams}" + (f", {at.num_slots} slots each" if at.num_slots else "")
            cut = f", to cut {at.cut_s * 1e3:.3f}" if at.num_slots > 1 else ""
            lines.append(f"{where:>24} " + " ".join(f"{s * 1e3:>7.3f}" for s in at.seconds) + cut)
    return "\n".join([*lines, f"written: {path}"])
