"""generate: continue a prompt, printing text as it is accepted."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kdtree_nb.commands import common

if TYPE_CHECKING:
    from kdtree_nb.model import Model
    from kdtree_nb.speculate import Engine, Generation, Sampling, StepRecord

HELP = "continue a prompt, printing text as it is accepted"
EPILOG = """example:
  printf 'def add(a, b):\\n' | kdtree-nb generate --max-new-tokens 64"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--prompt", help="text to continue (default: standard input)")
    common.add_generation_arguments(parser)
    parser.add_argument(
        "--chat", action="store_true", help="the prompt is a user's message: put it into the checkpoint's chat template"
    )
    parser.add_argument("--ar", action="store_true", help="plain decoding, one token per target forward")
    parser.add_argument(
        "--metrics", action="store_true",
        help="with --json: also decode without a drafter; tell acceptance by depth and rank, times and speedup",
    )  # fmt: skip
    parser.add_argument(
        "--max-seq-len", type=int, metavar="N",
        help="most tokens of prompt and output together (default: the model's, at most 4096)",
    )  # fmt: skip
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0: greedy (default); 1: the model's"
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K most likely tokens (default: all)")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="of those, from the fewest that make up P (default: 1)"
    )
    parser.add_argument(
        "--tensor-parallel", action="store_true",
        help="this process is one of 2, 4 or 8 ranks: torchrun --nproc-per-node 2 -m kdtree_nb generate …",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, metavar="N", help="of the draws; the same seed, the same text (default: 0)")


def run(args: argparse.Namespace) -> int:
    """Generate; statistics go to standard error."""
    if args.metrics and not args.json:
        raise ValueError("--metrics: expected --json beside it, got none")
    if args.tensor_parallel and args.prompt is None:
        raise ValueError("--tensor-parallel: expected --prompt beside it, which every rank must have, got none")
    sampling, drafting = _sampling(args), common.drafting(args, args.ar)
    text, source = _prompt(args)
    with common.ranks(args) as ranks:
        model = common.load(args, ranks)
        prompt = _chat(model, text) if args.chat else common.encode(model, text, source)
        _generate(args, model, text, prompt, drafting, sampling)
    return 0


def _generate(
    args: argparse.Namespace, model: Model, text: str, prompt: list[int], drafting: common.Drafting, sampling: Sampling
) -> None:  # fmt: skip
    from kdtree_nb.speculate import Engine

    _, drafter, budget, mode = drafting
    engine = Engine(model, drafter=drafter, budget=budget, max_seq_len=args.max_seq_len, mode=mode)
    generate = engine.generate_ar if drafter is None else engine.generate_ddtree
    generate = functools.partial(generate, sampling=sampling)
    if args.json:
        metrics = {"metrics": _metrics(engine, generate, prompt, args.max_new_tokens)} if args.metrics else {}
        result = generate(prompt, args.max_new_tokens)
        print(json.dumps({"model": args.model, "prompt": text, **common.generation_json(model, result), **metrics}))
        return
    result = print_text(model, functools.partial(generate, prompt, args.max_new_tokens))
    if model.ranks.rank == 0:
        print(_summary(result), file=sys.stderr)


def _summary(result: Generation) -> str:
    num_forwards = result.stats.num_target_forwards
    per_forward = f", {result.stats.tokens_per_step:.2f} tokens per forward" if num_forwards else ""
    return (
        f"[{len(result.tokens)} tokens in {num_forwards} target forwards{per_forward}, "
        f"stopped by {result.finish_reason}]"
    )


def _metrics(
    engine: Engine, generate: Callable[..., Generation], prompt: list[int], num_tokens: int
) -> dict[str, Any]:  # fmt: skip
    """Metrics of one text. What is timed has run before, and nothing watches it."""
    from kdtree_nb.speculate.metrics import RankCounter, summarize

    ranks, ar = RankCounter(), functools.partial(engine.generate_ar, sampling=generate.keywords["sampling"])
    generate(prompt, num_tokens, on_step=ranks)
    ar(prompt, num_tokens)
    return summarize([generate(prompt, num_tokens)], [ar(prompt, num_tokens)], ranks).to_dict()


def _chat(model: Model, text: str) -> list[int]:
    """Ids of a conversation of one message and the beginning of the answer."""
    apply = getattr(model.tokenizer, "apply_chat_template", None)
    if apply is None:
        raise ValueError(
            "--chat: expected a checkpoint folder with a tokenizer and a chat template, got a model without"
        )
    return apply([{"role": "user", "content": text}])


def _sampling(args: argparse.Namespace) -> Sampling:
    """The Sampling that the options name. Raises ValueError on options that would have no effect."""
    from kdtree_nb.speculate import Sampling

    given = {name: getattr(args, name) for name in ("top_k", "top_p", "seed") if getattr(args, name) is not None}
    if given and args.temperature == 0:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"{options}: expected --temperature above 0 beside it, got greedy decoding")
    return Sampling(args.temperature, **given)


def _prompt(args: argparse.Namespace) -> tuple[str, str]:
    """The prompt and where it came from."""
    if args.prompt is not None:
        return args.prompt, "--prompt"
    if sys.stdin.isatty():
        print("kdtree-nb generate: reading the prompt from the terminal; end it with Ctrl-D", file=sys.stderr)
    try:
        return sys.stdin.buffer.read().decode(), "standard input"
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input: expected UTF-8 text, got other bytes at offset {error.start}") from error


def print_text(model: Model, generate: Callable[..., Generation]) -> Generation:
    """What `generate(on_step=…)` gives, its text printed step by step. Whatever ends it ends its line too."""
    printer = TextPrinter(model)
    try:
        result = generate(on_step=printer)
        printer.finish()
    except BaseException:
        printer.finish()  # again, where an interrupt has come into the first
        raise
    return result


class TextPrinter:
    """Prints what each step emits; a character whose bytes are not all there yet waits for them."""

    def __init__(self, model: Model) -> None:
        self.model, self.decoder, self.is_in_line = model, model.tokenizer.stream(), False

    def __call__(self, step: StepRecord) -> None:
        """`on_step` of the engine, for one stream."""
        tokens = common.without_stop(self.model, step.emitted[0])
        self._write("".join([self.decoder.push(token) for token in tokens]))

    def finish(self) -> None:
        """Print what still waits, and end the line that was begun. A second time it does what is left to do."""
        self._write(self.decoder.finish())
        if self.is_in_line:
            self._write("\n")

    def _write(self, text: str) -> None:
        if text:
            self.is_in_line = True  # an interrupt while it is written leaves it unknown where the text stands
            common.write_text(text)
            self.is_in_line = text[-1] != "\n"
