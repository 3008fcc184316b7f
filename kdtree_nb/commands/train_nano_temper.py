"""Step temper of `kdtree-nb train-nano`: divide a drafter's logits by the temperature at which it expects as many
accepted tokens as it gets, on text that its target writes after pieces of the training stream.

The temperature is written into the folder's weights, so that it costs nothing where the drafter is used.
"""

from __future__ import annotations

import argparse
import datetime
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kdtree_nb import load_model
from kdtree_nb.bench import acceptance
from kdtree_nb.bench.prompt_sets import packed_prompts
from kdtree_nb.config import MAX_BUDGET
from kdtree_nb.drafters import DFlash
from kdtree_nb.errors import CorpusError
from kdtree_nb.model import Model
from kdtree_nb.train.drafter.temper import (
    find_temperature,
    mean_excess,
    tempered,
    untempered_record,
    write_tempered,
)
from kdtree_nb.train.nano.cli_target import read_corpus
from kdtree_nb.train.nano.tokens import TokenCorpus
from kdtree_nb.train.options import device_name

TEXTS, NUM_TOKENS, MAX_TEXTS = 64, 128, 4096


class Trials:
    """What a drafter expects and gets along the same texts, at every temperature that was asked for.

    The steps are those that the engine would take with that temperature's trees. sums: by temperature, for each budget
    {"budget", "tau", "expected", "accepted"}, of a step on average
    """

    def __init__(
        self, model: Model, drafter: DFlash, prompts: Sequence[list[int]], num_tokens: int, budgets: Sequence[int]
    ) -> None:
        self.model, self.drafter, self.prompts, self.budgets = model, drafter, prompts, tuple(budgets)
        self.texts = acceptance.decode_texts(model, prompts, num_tokens, show_progress=True)
        self.sums: dict[float, list[dict[str, Any]]] = {}

    def excess(self, temperature: float) -> float:
        """The mean over the chain and all budgets of expected / accepted - 1."""
        drafter = tempered(self.drafter, temperature)
        found = acceptance.measure_acceptance(self.model, drafter, self.prompts, self.texts, self.budgets, True)
        fields = ("budget", "tau", "expected", "accepted")
        self.sums[temperature] = [{field: entry[field] for field in fields} for entry in found.report()]
        excess = mean_excess(self.sums[temperature])
        print(f"temperature {temperature:.4f}: expected over accepted {excess:+.2%}", flush=True)
        return excess


def parse_args(argv: list[str], prog: str) -> argparse.Namespace:
    """Options of the step."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    add = parser.add_argument
    add("--target", type=Path, required=True, help="checkpoint folder of the target, with its tokenizer.json")
    add("--drafter", type=Path, required=True, help="folder made by `train-nano drafter` for this target; changed")
    add("--corpus", required=True, help="what `train-nano generate` read: file made by `train-nano pack`, or stdlib")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    add("--texts", type=int, default=TEXTS, help="more take longer and leave less to chance (default: %(default)s)")
    add("--max-new-tokens", type=int, default=NUM_TOKENS, help="tokens of a text (default: %(default)s)")
    add(
        "--budgets",
        type=int,
        nargs="+",
        default=list(acceptance.BUDGETS),
        help="of the trees, each of which counts as much as the chain (default: those of `kdtree-nb evaluate`)",
    )
    add("--seed", type=int, default=0, help="of the places of the prompts (default: 0)")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: expected a GPU that torch can use, found none; use --device cpu")
    bounds = {"texts": (1, MAX_TEXTS), "max-new-tokens": (2, MAX_TEXTS), "seed": (0, 2**31 - 1)}
    for option, (smallest, largest) in bounds.items():
        value = getattr(args, option.replace("-", "_"))
        if not smallest <= value <= largest:
            parser.error(f"--{option}: expected an integer of {smallest} … {largest}, got {value}")
    if not all(1 <= budget <= MAX_BUDGET for budget in args.budgets) or len(set(args.budgets)) < len(args.budgets):
        parser.error(f"--budgets: expected different numbers of 1 … {MAX_BUDGET}, got {args.budgets}")
    return args


def main(step: str, argv: list[str], prog: str) -> None:
    """Find the temperature and write the drafter with it."""
    args = parse_args(argv, prog)
    record = untempered_record(args.drafter, args.target)
    corpus = read_training_corpus(args, record)
    model, drafter = load_model(args.target, args.device), DFlash.load(args.drafter)
    prompts = packed_prompts(corpus, "train", args.texts, seed=args.seed).prompts
    trials = Trials(model, drafter, prompts, args.max_new_tokens, args.budgets)
    temperature = find_temperature(trials.excess)
    entry = make_entry(args, f"{prog} {' '.join(argv)}", corpus, trials.sums, temperature)
    write_tempered(args.drafter, tempered(drafter, temperature), record, entry)
    print(table(entry))
    print(f"{args.drafter}: tempered with {temperature:.4f}")


def read_training_corpus(args: argparse.Namespace, record: dict[str, Any]) -> TokenCorpus:
    """The corpus that the drafter's texts begin with: of another one, what it holds out may have been trained on."""
    corpus = read_corpus(args.corpus, args.target / "tokenizer.json")
    have, expected = corpus.record["streams"]["train"]["sha256"], record["texts"].get("corpus", "")
    if have != expected:
        raise CorpusError(
            f"temper: {args.corpus}: expected the training stream of the drafter's texts ({expected[:12]}), got "
            f"another ({have[:12]}); give the corpus that `train-nano generate` read"
        )
    return corpus


def make_entry(
    args: argparse.Namespace, command: str, corpus: TokenCorpus, sums: dict[float, list[dict[str, Any]]],
    temperature: float,
) -> dict[str, Any]:  # fmt: skip
    """What the drafter's record says about it."""
    return {
        "command": command,
        "date": datetime.date.today().isoformat(),
        "device": device_name(torch.device(args.device)),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "temperature": temperature,
        "corpus": corpus.record["streams"]["train"]["sha256"],
        "num_texts": args.texts,
        "num_tokens": args.max_new_tokens,
        "seed": args.seed,
        "excess": {f"{tried:.6f}": mean_excess(found) for tried, found in sums.items()},
        "before": sums[1.0],
        "after": sums[temperature],
    }


def table(entry: dict[str, Any]) -> str:
    """Expected and accepted tokens of a step by budget, as trained and tempered."""
    columns = f"{'expected':>10}{'accepted':>10}{'tau':>8}"
    lines = [f"{'budget':>8}{columns}   tempered:{columns}"]
    for before, after in zip(entry["before"], entry["after"], strict=True):
        one, other = (f"{sums['expected']:10.2f}{sums['accepted']:10.2f}{sums['tau']:8.2f}" for sums in (before, after))
        lines.append(f"{before['budget']:>8}{one}            {other}")
    return "\n".join(lines)
