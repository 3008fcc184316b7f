"""convert: KDTR to safetensors and back, bit for bit."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "convert KDTR to safetensors or back, tensors and metadata bit for bit"
SUFFIXES = (".kdtr", ".safetensors")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("source", type=Path, help="a .kdtr or .safetensors file")
    parser.add_argument("target", type=Path, help="the file to write, of the other kind")
    parser.add_argument("--force", action="store_true", help="overwrite the target if it exists")


def run(args: argparse.Namespace) -> int:
    """Convert in the direction that the suffixes say."""
    from kdtree_nb.kdtr import from_safetensors, open_kdtr, to_safetensors

    kinds = (args.source.suffix, args.target.suffix)
    if sorted(kinds) != sorted(SUFFIXES):
        raise ValueError(
            f"expected one file name that ends in .kdtr and one in .safetensors, got {' and '.join(kinds)}"
        )
    if args.target.exists() and not args.force:
        raise ValueError(f"{args.target} exists; give --force to overwrite it")
    to_kdtr = args.target.suffix == ".kdtr"
    (from_safetensors if to_kdtr else to_safetensors)(args.source, args.target)
    file = open_kdtr(args.target if to_kdtr else args.source)
    print(f"{args.target}: {len(file.names)} tensors, {args.target.stat().st_size:,} bytes")
    return 0
