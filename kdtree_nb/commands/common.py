"""What several commands share: options of a generation, the model and drafter they name, and text for a terminal."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kdtree_nb.errors import KdtreeError

if TYPE_CHECKING:
    from kdtree_nb.drafters import AnyDrafter
    from kdtree_nb.model import Model
    from kdtree_nb.model.ranks import Ranks
    from kdtree_nb.parallel import Patience, TensorParallel
    from kdtree_nb.speculate import Generation

DRAFTERS = ("ngram", "none", "random")
DTYPES = ("float32", "bfloat16")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that say which model is loaded, and where."""
    parser.add_argument(
        "--model", default="tiny", help="checkpoint folder, KDTR file, or 'tiny', 'tiny2' or 'nano-k2' (default: tiny)"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="of weights and activations (default: float32)"
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")


def add_generation_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that say what is generated, and how."""
    add_model_arguments(parser)
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default: 128")
    parser.add_argument(
        "--budget", type=budget, metavar="N",
        help="drafted nodes per step, or auto: as many as pay by `kdtree-nb calibrate` (default: 16)",
    )  # fmt: skip
    parser.add_argument("--mode", choices=("tree", "chain"), help="what is drafted (default: tree)")
    parser.add_argument(
        "--drafter", metavar="NAME",
        help=f"who proposes tokens: {', '.join(DRAFTERS)}, or a DFlash drafter's folder, or nano-k2 (default: ngram)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def budget(text: str) -> int | str:
    """The value of --budget. Raises ArgumentTypeError for what is neither a number nor auto."""
    try:
        return text if text == "auto" else int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a number of nodes or auto, got {text!r}") from error


class Drafting(NamedTuple):
    """What --drafter (its name as given, and itself; None for none), --budget and --mode come to."""

    name: str
    drafter: AnyDrafter | None
    budget: int | str
    mode: str


def drafting(args: argparse.Namespace, is_ar: bool = False) -> Drafting:
    """How the options say to draft; not at all with `is_ar`, which --ar gave. Raises ValueError on options that would
    then have no effect, and what `make_drafter` raises."""
    if is_ar or args.drafter == "none":
        named = args.drafter if is_ar and args.drafter != "none" else None
        given = {"drafter": named, "budget": args.budget or None, "mode": args.mode}
        useless = ", ".join(f"--{name} {value}" for name, value in given.items() if value is not None)
        if useless:
            raise ValueError(
                f"{useless}: expected a drafter, got {'--ar' if is_ar else '--drafter none'}, which drafts nothing; "
                "give one or the other"
            )
        return Drafting("none", None, 0, "tree")
    name = "ngram" if args.drafter is None else args.drafter
    nodes = 16 if args.budget is None else args.budget
    return Drafting(name, make_drafter(name), nodes, args.mode or "tree")


@contextlib.contextmanager
def ranks(args: argparse.Namespace) -> Iterator[Ranks]:
    """This process alone or, with --tensor-parallel, one of those that torchrun has started; only rank 0 prints."""
    from kdtree_nb.model.ranks import ONE_RANK

    if not args.tensor_parallel:
        yield ONE_RANK
        return
    with started(args) as group:
        yield group


@contextlib.contextmanager
def started(args: argparse.Namespace, patience: Patience | None = None) -> Iterator[TensorParallel]:
    """This process as one of those that torchrun has started, on --device; only rank 0 prints."""
    from kdtree_nb.parallel import start
    from kdtree_nb.parallel.watch import PATIENCE

    with contextlib.ExitStack() as stack:
        group = stack.enter_context(start(args.device, patience or PATIENCE))
        args.device = str(group.device)
        if group.rank > 0:
            silent = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(silent))
        yield group


def end_of_rank(device: str, run: Callable[[], int]) -> int:
    """What `run` returns. On a GPU the process ends with it, also by an error: captured graphs and NCCL's communicators
    have no order in which both could be destroyed, and one that waits for a rank that is gone would never end."""
    if device == "cpu":
        return run()
    status = 2
    try:
        status = run()
    except (KdtreeError, ValueError, OSError) as error:
        print(f"kdtree-nb: {error}", file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def load(args: argparse.Namespace, ranks: Ranks | None = None) -> Model:
    """The model that --model, --device and --dtype name, or the share of one of `ranks`. Errors as of `load_model`."""
    import torch

    from kdtree_nb.model import load_model
    from kdtree_nb.model.ranks import ONE_RANK

    try:
        device = torch.device(args.device)
    except RuntimeError as error:
        raise ValueError(f"--device: expected cpu, cuda or cuda:N, got {args.device!r}") from error
    return load_model(args.model, device, getattr(torch, args.dtype), ranks=ranks or ONE_RANK)


def make_drafter(name: str) -> AnyDrafter | None:
    """The drafter that --drafter names; None for 'none'. Raises ValueError for a name that is neither one nor a folder,
    and CheckpointError for a folder without a drafter."""
    from kdtree_nb import drafters
    from kdtree_nb.model.checkpoint import NANO

    named = {"ngram": drafters.NGram, "random": drafters.Random, "none": lambda: None}
    if name in named:
        return named[name]()
    if not Path(name).is_dir() and name != NANO:
        raise ValueError(f"--drafter: expected one of {', '.join(DRAFTERS)}, or a folder, got {name!r}")
    return drafters.DFlash.load(name)


def encode(model: Model, text: str, source: str) -> list[int]:
    """Token ids of a prompt. Raises ValueError for text that is empty or no valid Unicode."""
    try:
        ids = model.tokenizer.encode(text)
    except UnicodeEncodeError as error:
        raise ValueError(f"{source}: expected UTF-8 text, got other bytes at character {error.start}") from error
    if not ids:
        raise ValueError(f"{source}: expected at least one character, got an empty prompt; give one with --prompt")
    return ids


def without_stop(model: Model, tokens: list[int]) -> list[int]:
    """`tokens` without an end-of-text token at their end."""
    return tokens[:-1] if tokens and tokens[-1] in model.config.eos_token_ids else tokens


def generation_json(model: Model, generation: Generation) -> dict[str, Any]:
    """A Generation as JSON fields."""
    stats = generation.stats
    return {
        "text": model.tokenizer.decode(without_stop(model, generation.tokens)),
        "tokens": generation.tokens,
        "finish_reason": generation.finish_reason,
        "num_target_forwards": stats.num_target_forwards,
        "num_prefill_forwards": stats.num_prefill_forwards,
        "tokens_per_step": stats.tokens_per_step if stats.nodes_per_step else None,
        "accepted_per_step": stats.accepted_per_step,
        "nodes_per_step": stats.nodes_per_step,
        "seconds": stats.seconds,
    }


def printable(text: str) -> str:
    """`text` with control characters other than line feed and tab as pictures, so that no terminal obeys them."""
    return "".join(c if c in "\n\t" or not _is_control(c) else _picture(c) for c in text)


def _is_control(char: str) -> bool:
    return ord(char) < 32 or 127 <= ord(char) < 160


def _picture(char: str) -> str:
    return chr(0x2400 + ord(char)) if ord(char) < 32 else "\N{SYMBOL FOR DELETE}"


def write_text(text: str) -> None:
    """Write to stdout at once; control characters as pictures where a terminal reads it, as they are elsewhere."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()
