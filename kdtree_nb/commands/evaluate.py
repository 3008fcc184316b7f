"""evaluate: what a drafter is worth on held-out prompts, by budget."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdtree_nb.commands import common

if TYPE_CHECKING:
    from kdtree_nb.bench.prompt_sets import PromptSet
    from kdtree_nb.bench.runner import Measurement
    from kdtree_nb.drafters import AnyDrafter
    from kdtree_nb.model import Model

HELP = "tokens per target forward of a drafter on held-out prompts, by budget"
EPILOG = """With the budgets of --check the engine decodes every prompt too: its tokens must be those of AR, its steps
those that were worked out. --times N decodes the first N prompts of each set by the clock: AR, the chain, every budget
and auto. What is written is a record that `viz.load_record` reads, with the figures of each set in full beside it.

example:
  kdtree-nb evaluate --model nano-k2 --drafter nano-k2 --device cuda --dtype bfloat16 --prompts packed --corpus \\
      tokens.pack --num-prompts 256 --check chain 64 --times 32 --coverage --out acceptance.json"""

_TAUS = ("tau", "tau_mean", "tau_first_tokens", "tau_less_repetitive")
NUM_PROMPTS = 32
"""Of code, where --num-prompts does not say it."""

SOURCES = ("library", "own", "pinned", "packed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    common.add_model_arguments(parser)
    parser.add_argument("--drafter", default="ngram", metavar="NAME", help="as in `kdtree-nb generate`")
    parser.add_argument(
        "--prompts", choices=SOURCES, default="library",
        help="held-out files of the standard library, data/prompts.json, held-out packages as they are installed, or "
        "those of a packed corpus (default: library)",
    )  # fmt: skip
    parser.add_argument("--corpus", type=Path, help="for packed: the file that `kdtree-nb train-nano pack` wrote")
    parser.add_argument(
        "--num-prompts", type=int, metavar="N", help="of code; of prose half as many (default: 32; of own all)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default: 128")
    parser.add_argument("--budgets", type=int, nargs="+", metavar="N", help="default: 8 16 32 64 128 256")
    parser.add_argument("--check", nargs="*", default=["chain"], metavar="B", help="chain or budgets (default: chain)")
    parser.add_argument("--times", type=int, default=0, metavar="N", help="prompts of a set to decode by the clock")
    parser.add_argument("--coverage", action="store_true", help="count the distinct experts by rows")
    parser.add_argument("--out", type=Path, metavar="FILE", help="record to write: .json file, or folder")
    parser.add_argument("--json", action="store_true", help="print it")


def run(args: argparse.Namespace) -> int:
    """Evaluate, print a table, write the record."""
    import json

    from kdtree_nb import bench
    from kdtree_nb.bench import acceptance
    from kdtree_nb.kdtr import expect_writable

    budgets = tuple(args.budgets or acceptance.BUDGETS)
    _check(args, budgets)
    drafter = common.make_drafter(args.drafter)
    if drafter is None:
        raise ValueError("--drafter: expected a drafter, got none")
    model = common.load(args)
    if args.out:  # rather an error now than behind the evaluation
        expect_writable(args.out.parent if args.out.suffix == ".json" else args.out)
    sets = _sets(args, model)
    checked = tuple(_budget(word) for word in args.check)
    prompts = {name: found.prompts for name, found in sets.items()}
    show = not args.json
    found = acceptance.evaluate(model, drafter, prompts, args.max_new_tokens, budgets, checked, show)
    measured = [*_taus(args, drafter, found), *_more(args, model, drafter, prompts, budgets)]
    record = bench.make_record(measured, command(args), model.device.type) | {
        "model": args.model, "dtype": args.dtype, "drafter": args.drafter,
        "sources": {name: found.source for name, found in sets.items()}, "sets": found,
    }  # fmt: skip
    if args.out:
        bench.write_record(record, args.out)
    print(json.dumps(record) if args.json else _table(record))
    return 0


def command(args: argparse.Namespace) -> str:
    """The command as typed, without the places of files."""
    words = ["kdtree-nb", "evaluate", "--model", Path(args.model).name, "--drafter", Path(args.drafter).name]
    words += ["--device", args.device, "--dtype", args.dtype, "--prompts", args.prompts]
    words += ["--num-prompts", args.num_prompts] if args.prompts != "own" else []
    words += ["--max-new-tokens", args.max_new_tokens]
    words += ["--budgets", *args.budgets] if args.budgets else []
    words += ["--check", *args.check, "--times", args.times, *(["--coverage"] if args.coverage else [])]
    return shlex.join(map(str, words))


def _check(args: argparse.Namespace, budgets: tuple[int, ...]) -> None:
    """Put defaults in their places. Raises ValueError on numbers that nothing could be measured with."""
    from kdtree_nb.config import MAX_BUDGET

    if args.prompts == "own" and args.num_prompts is not None:
        raise ValueError(f"--num-prompts: expected none with --prompts own, which takes all, got {args.num_prompts}")
    args.num_prompts = NUM_PROMPTS if args.num_prompts is None else args.num_prompts
    for option, smallest in (("num-prompts", 1), ("max-new-tokens", 1), ("times", 0)):
        value = getattr(args, option.replace("-", "_"))
        if value < smallest:
            raise ValueError(f"--{option}: expected at least {smallest}, got {value}")
    if not all(1 <= budget <= MAX_BUDGET for budget in budgets) or len(set(budgets)) < len(budgets):
        raise ValueError(f"--budgets: expected different numbers of 1 … {MAX_BUDGET}, got {list(budgets)}")
    words = ["chain", *map(str, budgets)]
    unknown = [word for word in args.check if word not in words]
    if unknown:
        raise ValueError(f"--check: expected some of {', '.join(words)} (see --budgets), got {unknown[0]!r}")


def _budget(word: str) -> int | str:
    return word if word == "chain" else int(word)


def _sets(args: argparse.Namespace, model: Model) -> dict[str, PromptSet]:
    """The sets of prompts by name."""
    from kdtree_nb.bench import prompt_sets as sets

    encode, counts = model.tokenizer.encode, {"code": args.num_prompts, "prose": -(-args.num_prompts // 2)}
    if (args.corpus is None) == (args.prompts == "packed"):
        raise ValueError(f"--corpus: expected it with --prompts packed and only there, got --prompts {args.prompts}")
    if args.prompts == "library":
        return {"code": sets.library_prompts(encode, args.num_prompts)}
    if args.prompts == "own":
        return {kind: sets.own_prompts(encode, kind) for kind in ("code", "repetitive")}
    if args.prompts == "packed":
        from kdtree_nb.train.nano.tokens import load_tokens

        corpus = load_tokens(args.corpus)
        return {kind: sets.packed_prompts(corpus, kind, count) for kind, count in counts.items()}
    from kdtree_nb.train.nano.cli_corpus import MANIFEST_PATH
    from kdtree_nb.train.nano.manifest import read_manifest

    manifest = read_manifest(MANIFEST_PATH)
    return {kind: sets.pinned_prompts(manifest, encode, kind, count) for kind, count in counts.items()}


def _taus(args: argparse.Namespace, drafter: AnyDrafter, sets: dict[str, Any]) -> list[Measurement]:
    """Tokens per target forward by set and budget, of the drafter and of prompt lookup."""
    from kdtree_nb.bench.budget_groups import accepted

    results = []
    for name, found in sets.items():
        params = {"model": Path(args.model).name, "set": name, "dtype": args.dtype}
        params |= {field: found[field] for field in ("num_texts", "num_tokens")}
        results += accepted(f"acceptance/{type(drafter).__name__}", found["budgets"], params)
        results += accepted("acceptance/prompt lookup", found["prompt_lookup"], params)
    return results


def _more(
    args: argparse.Namespace, model: Model, drafter: AnyDrafter, prompts: dict[str, list[list[int]]],
    budgets: tuple[int, ...],
) -> list[Measurement]:  # fmt: skip
    """What takes the clock, or a forward over trees: only where it was asked for."""
    from kdtree_nb.bench import acceptance, budget_groups
    from kdtree_nb.bench.runner import Effort

    found: list[Measurement] = []
    for name, of_set in prompts.items():
        params = {"model": Path(args.model).name, "set": name, "dtype": args.dtype}
        if args.times:
            effort, chosen = Effort(num_rounds=3, num_tokens=args.max_new_tokens), of_set[: args.times]
            more = {**params, "drafter": type(drafter).__name__}
            found += budget_groups.sweep("budget_sweep", model, drafter, chosen, budgets, effort, more)
        if args.coverage:
            texts = acceptance.decode_texts(model, of_set[:8], args.max_new_tokens)
            found += budget_groups.covered("expert_coverage", model, drafter, of_set[:8], texts, params)
    return found


def _table(result: dict[str, Any]) -> str:
    """tau by budget for each set, prompt lookup below, and the seconds where they were measured."""
    lines = []
    for name, found in result["sets"].items():
        lines.append(
            f"{name}: {found['num_texts']} texts of {found['num_tokens']} tokens, exact: {found['exact_texts']}"
        )
        lines.append(f"{'budget':>14}{'tau':>8}{'mean':>8}{'first':>8}{'varied':>8}{'expected':>10}{'accepted':>10}")
        rows = [(str(entry["budget"]), entry) for entry in found["budgets"]]
        rows.append(("prompt lookup", found["prompt_lookup"][0]))
        for label, entry in rows:
            taus = "".join(f"{entry[key]:8.2f}" for key in _TAUS)
            lines.append(f"{label:>14}{taus}{entry['expected']:10.2f}{entry['accepted']:10.2f}")
    for measured in result["results"]:
        if measured["unit"] == "s":
            rate = measured["params"]["num_texts"] * measured["params"]["num_tokens"] / sorted(measured["samples"])[1]
            lines.append(f"{measured['params']['set']:>14} {measured['name']:30}{rate:10.0f} tokens/s")
    return "\n".join(lines)
