"""kdtree-nb: the command line. Errors are one line on standard error and exit status 2; Ctrl-C ends with 130."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from kdtree_nb.commands import (
    bench,
    calibrate,
    convert,
    demo,
    doctor,
    evaluate,
    generate,
    make_refs,
    plan,
    train_nano,
    train_tiny,
)
from kdtree_nb.errors import KdtreeError

COMMANDS = {
    "demo": demo,
    "generate": generate,
    "bench": bench,
    "calibrate": calibrate,
    "evaluate": evaluate,
    "convert": convert,
    "plan": plan,
    "doctor": doctor,
    "make-refs": make_refs,
}
TRAIN = {"train-tiny": train_tiny, "train-nano": train_nano}
"""The commands that have parsers of their own, since those know about torch."""

USAGE_ERROR, INTERRUPTED = 2, 130


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="kdtree-nb", description="Exact speculative decoding with draft trees.",
        epilog="`kdtree-nb COMMAND --help` lists the options of a command.",
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        command = commands.add_parser(
            name, help=module.HELP, description=f"{module.HELP[0].upper()}{module.HELP[1:]}.",
            epilog=getattr(module, "EPILOG", None), formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    for name, module in TRAIN.items():
        commands.add_parser(name, help=module.HELP, add_help=False)
    return parser


def _prepare_streams() -> None:
    """Closed standard streams (`<&-`) read and write nothing; a character that stdout's encoding lacks becomes `?`."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    _prepare_streams()
    argv = sys.argv[1:] if argv is None else list(argv)
    name = argv[0] if argv and not argv[0].startswith("-") else ""
    try:
        if name in TRAIN:
            return TRAIN[name].run(argv[1:])
        args = build_parser().parse_args(argv)
        status = args.run(args)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print(f"\nkdtree-nb {name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (KdtreeError, ValueError, OSError, ArithmeticError) as error:
        print(f"kdtree-nb {name}: {error}", file=sys.stderr)
        return USAGE_ERROR


if __name__ == "__main__":
    sys.exit(main())
