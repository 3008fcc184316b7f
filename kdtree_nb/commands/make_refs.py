"""make-refs: compute the goldens with the numpy reference in float64, or check the committed ones."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HELP = "compute the goldens (greedy tokens and logits of the float64 reference), or check them"
MODELS = ("tiny", "tiny2")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--check", action="store_true", help="compute them again and compare; write nothing")
    parser.add_argument("--model", choices=MODELS, action="append", help="one model only (may be repeated)")
    parser.add_argument("--dir", type=Path, help="folder of the goldens (default: data/goldens)")


def run(args: argparse.Namespace) -> int:
    """Exit status 1 if --check finds a difference."""
    from tqdm.auto import tqdm

    from kdtree_nb import goldens

    folder = args.dir or goldens.GOLDENS_DIR
    for model in tqdm(args.model or MODELS, desc="check goldens" if args.check else "make goldens", unit="model"):
        if not args.check:
            tqdm.write(str(goldens.make_refs([model], folder)[model]))
            continue
        try:
            goldens.check_refs([model], folder)
        except ValueError as difference:
            tqdm.write(f"kdtree-nb make-refs: {difference}", file=sys.stderr)
            return 1
        tqdm.write(f"{model}: the goldens are what the reference computes")
    return 0
