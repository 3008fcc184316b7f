"""train-nano: make nano-k2, its corpus, its tokenizer, its drafter and the text that the drafter learns from.

Each step is a module with a parser of its own, since that knows about torch: of `kdtree_nb.train`, but for the one that
measures.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

HELP = "train nano-k2, step by step: manifest, tokenizer, pack, target, generate, drafter, temper, compare"

STEPS = {
    "manifest": ("kdtree_nb.train.nano.cli_corpus", "write the manifest of this environment's packages"),
    "tokenizer": ("kdtree_nb.train.nano.cli_corpus", "train the tokenizer on the pinned corpus"),
    "pack": ("kdtree_nb.train.nano.cli_corpus", "encode the pinned corpus into one small file"),
    "target": ("kdtree_nb.train.nano.cli_target", "train the target and write it as a checkpoint folder"),
    "generate": ("kdtree_nb.train.nano.cli_generate", "let the target continue training text, for its drafter"),
    "drafter": ("kdtree_nb.train.drafter.cli", "train the drafter on that text and write it as a checkpoint folder"),
    "temper": (
        "kdtree_nb.commands.train_nano_temper",
        "give the drafter a temperature, so that it expects what it gets",
    ),
    "compare": ("kdtree_nb.train.nano.cli_compare", "say how far the loss curves of two runs lie apart"),
}
"""Step -> (module whose `main(step, argv, prog)` does it, one line of help)."""


def run(argv: Sequence[str]) -> int:
    """Hand the words behind the step's name to the step."""
    step = argv[0] if argv else "--help"
    if step in STEPS:
        importlib.import_module(STEPS[step][0]).main(step, list(argv[1:]), f"kdtree-nb train-nano {step}")
        return 0
    lines = [f"  {name:<10} {line}\n" for name, (_, line) in STEPS.items()]
    usage = "usage: kdtree-nb train-nano STEP [options]\n\n" + "".join(lines)
    if step in ("-h", "--help"):
        print(f"{usage}\n`kdtree-nb train-nano STEP --help` lists the options of a step.")
        return 0
    print(f"{usage}\ntrain-nano: expected one of {', '.join(STEPS)}, got {step!r}", file=sys.stderr)
    return 2
