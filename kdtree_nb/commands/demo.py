"""demo: one real prompt, decoded token by token and with draft trees, side by side, and whether they are the same."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kdtree_nb.commands import common
from kdtree_nb.commands.columns import Piece, side_by_side

if TYPE_CHECKING:
    from kdtree_nb.model import Model
    from kdtree_nb.speculate import Generation

HELP = "decode a prompt token by token and with draft trees, side by side; status 1 if they differ"
WARM_UP_TOKENS = 8
NUM_RUNS = 3
MIN_WIDTH = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", help="text to continue (default: a prompt of this project, see --prompt-name)")
    prompt.add_argument("--prompt-name", default="properties", help="one of data/prompts.json (default: properties)")
    common.add_generation_arguments(parser)


class Verdict(NamedTuple):
    """How many of the tokens and of the logits' bit patterns are equal."""

    equal_tokens: int
    num_tokens: int
    equal_logits: int
    num_logits: int

    @property
    def is_exact(self) -> bool:
        """Whether all are, and there are any."""
        return 0 < self.num_tokens == self.equal_tokens and 0 < self.num_logits == self.equal_logits


def run(args: argparse.Namespace) -> int:
    """Exit status 1 unless tokens and logits are equal to the bit."""
    from kdtree_nb.speculate import Engine

    if args.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens: expected at least 1, got {args.max_new_tokens}")
    drafting = common.drafting(args)
    text = args.prompt if args.prompt is not None else named_prompt(args.prompt_name)
    model = common.load(args)
    prompt = common.encode(model, text, "--prompt")
    engine = Engine(model, drafter=drafting.drafter, budget=drafting.budget, mode=drafting.mode)
    generates = engine.generate_ar, engine.generate_ddtree
    for generate in generates:
        generate(prompt, min(WARM_UP_TOKENS, args.max_new_tokens))
    runs = [
        tuple(generate(prompt, args.max_new_tokens, return_logits=True) for generate in generates)
        for _ in range(NUM_RUNS)
    ]
    verdict = min((compare(ar, ddtree) for ar, ddtree in runs), key=lambda verdict: verdict.is_exact)
    decode_s = tuple(statistics.median(map(decode_seconds, by_kind)) for by_kind in zip(*runs, strict=True))
    ar, ddtree = runs[0]
    if args.json:
        print(json.dumps(report(args, drafting, text, model, ar, ddtree, verdict)))
    else:
        print_comparison(drafting.name, text, model, ar, ddtree, decode_s, verdict)
    return 0 if verdict.is_exact else 1


def decode_seconds(generation: Generation) -> float:
    """Wall seconds of everything but the prefill."""
    return sum(seconds for stage, seconds in generation.stats.seconds.items() if stage != "prefill")


def named_prompt(name: str) -> str:
    """The text of a prompt in data/prompts.json. Raises ValueError for an unknown name."""
    from kdtree_nb.model.checkpoint import DATA_DIR

    entries = json.loads((DATA_DIR / "prompts.json").read_text(encoding="utf-8"))["prompts"]
    texts = {entry["name"]: entry["text"] for entry in entries}
    if name not in texts:
        raise ValueError(f"--prompt-name: expected one of {', '.join(texts)}, got {name!r}")
    return texts[name]


def compare(ar: Generation, ddtree: Generation) -> Verdict:
    """Count equal tokens, and equal logits by their bits (so that a NaN equals nothing but itself)."""
    import torch

    equal = sum(a == b for a, b in zip(ar.tokens, ddtree.tokens, strict=False))
    a, b = (generation.logits.view(torch.int32) for generation in (ar, ddtree))
    n = min(len(a), len(b))
    return Verdict(
        equal, max(len(ar.tokens), len(ddtree.tokens)), int((a[:n] == b[:n]).sum()), max(a.numel(), b.numel())
    )


def pieces(model: Model, generation: Generation) -> list[Piece]:
    """The text, each drafted token that was accepted marked. A character belongs to the token that completes it."""
    from kdtree_nb.model import StreamDecoder

    drafted: list[bool] = []
    accepted = generation.stats.accepted_per_step
    for step, count in enumerate(accepted):
        last = step + 1 == len(accepted)
        length = len(generation.tokens) - len(drafted) if last else count + 1
        drafted += [i < count for i in range(length)]
    decoder = StreamDecoder()
    tokens = common.without_stop(model, generation.tokens)
    texts = [Piece(decoder.push(token), is_drafted) for token, is_drafted in zip(tokens, drafted, strict=False)]
    return [*texts, Piece(decoder.finish())]


def report(
    args: argparse.Namespace, drafting: common.Drafting, text: str, model: Model, ar: Generation, ddtree: Generation,
    verdict: Verdict,
) -> dict[str, Any]:  # fmt: skip
    """Everything as JSON fields."""
    return {
        "model": args.model,
        "dtype": args.dtype,
        "drafter": drafting.name,
        "budget": drafting.budget,
        "mode": drafting.mode,
        "prompt": text,
        "ar": common.generation_json(model, ar),
        "ddtree": common.generation_json(model, ddtree),
        "verdict": {**verdict._asdict(), "is_exact": verdict.is_exact},
        "num_target_forwards_saved": ar.stats.num_target_forwards - ddtree.stats.num_target_forwards,
    }


def print_comparison(
    drafter: str, text: str, model: Model, ar: Generation, ddtree: Generation,
    decode_s: tuple[float, float], verdict: Verdict,
) -> None:  # fmt: skip
    """Prompt, both texts side by side, and a table of what they cost."""
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    width = max(MIN_WIDTH, min(shutil.get_terminal_size().columns, 140))
    print(f"prompt ({len(text.encode())} bytes):\n{common.printable(text)}\n")
    titles = "AR decoding", f"DDTree, {drafter}" + (", green: drafted" if colour else "")
    columns = pieces(model, ar), pieces(model, ddtree)
    print("\n".join(side_by_side(*columns, titles, width, colour)) + "\n")
    for label, left, right, note in table(ar, ddtree, decode_s):
        print(f"{label:24}{left:>10}{right:>10}   {note}".rstrip())
    word = "exact" if verdict.is_exact else "NOT EXACT"
    print(
        f"\n{word}: {verdict.equal_tokens} of {verdict.num_tokens} tokens equal, "
        f"{verdict.equal_logits} of {verdict.num_logits} logits equal to the bit"
    )


def table(ar: Generation, ddtree: Generation, decode_s: tuple[float, float]) -> Sequence[tuple[str, str, str, str]]:
    """Rows of (label, AR, DDTree, note)."""
    forwards = ar.stats.num_target_forwards, ddtree.stats.num_target_forwards
    return [
        ("", "AR", "DDTree", ""),
        ("tokens", str(len(ar.tokens)), str(len(ddtree.tokens)), ""),
        ("target forwards", str(forwards[0]), str(forwards[1]), f"{forwards[0] - forwards[1]} saved"),
        ("tokens per step", f"{ar.stats.tokens_per_step:.2f}", f"{ddtree.stats.tokens_per_step:.2f}", ""),
        ("decoding, ms", f"{1e3 * decode_s[0]:.1f}", f"{1e3 * decode_s[1]:.1f}",
         f"{decode_s[0] / decode_s[1]:.2f} × the speed (median of {NUM_RUNS} runs)"),
    ]  # fmt: skip
