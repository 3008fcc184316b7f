"""What the training steps of `kdtree-nb train-nano` share: their options, and how a run is carried out by them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from kdtree_nb.train.run import TrainingRun


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Where, how long, from which checkpoint."""
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    add("--steps", type=int, help="length of the schedule, instead of the preset's")
    add("--seed", type=int, default=0)
    add("--checkpoints", type=Path, help="folder for checkpoints; a run that finds one goes on from it")
    add("--checkpoint-every", type=int, default=0, metavar="STEPS", help="beside the one at the end")
    add("--stop-at", type=int, metavar="STEP", help="stop there with a checkpoint; the schedule is still --steps long")
    add("--threads", type=int, default=1, help="on cpu; more wait for each other on these small matrices (default: 1)")
    add("--no-compile", action="store_true", help="on cuda: do not compile layers")


def parse_run_options(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """Parse, exit with a message where options do not go together, and set the number of threads."""
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: expected a GPU that torch can use, found none; use --device cpu")
    if args.stop_at is not None and args.checkpoints is None:
        parser.error("--stop-at: expected --checkpoints FOLDER to go on from")
    for option, smallest in (("threads", 1), ("seed", 0), ("stop-at", 1), ("checkpoint-every", 0)):
        value = getattr(args, option.replace("-", "_"))
        if value is not None and not smallest <= value < 2**31:
            parser.error(f"--{option}: expected an integer of {smallest} … 2^31 - 1, got {value}")
    if args.device == "cpu":
        torch.set_num_threads(args.threads)
    return args


def given(args: argparse.Namespace, **options: str) -> dict[str, Any]:
    """Field of a recipe -> value, for the options (by field) that the command line gives."""
    values = {field: getattr(args, option) for field, option in options.items()}
    return {field: value for field, value in values.items() if value is not None}


def carry_out(run: TrainingRun, args: argparse.Namespace) -> bool:
    """Go on from a checkpoint if there is one, and train; whether the run came to its end."""
    if args.checkpoints is not None and run.resume(args.checkpoints):
        print(f"{args.checkpoints}: going on from step {run.step}")
    if args.device == "cuda" and not args.no_compile:
        run.compile()
    until = run.num_steps if args.stop_at is None else min(args.stop_at, run.num_steps)
    run.run(until, args.checkpoints, args.checkpoint_every)
    if run.step < run.num_steps:
        print(f"{args.checkpoints}: stopped at step {run.step} of {run.num_steps}")
    return run.step == run.num_steps


def device_name(device: torch.device) -> str:
    """For a record: the GPU, or the CPU with its threads."""
    is_cuda = device.type == "cuda"
    return torch.cuda.get_device_name(device) if is_cuda else f"CPU, {torch.get_num_threads()} threads"
