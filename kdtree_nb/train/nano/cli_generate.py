"""Step generate of `kdtree-nb train-nano`: the target continues training text greedily, for its drafter to learn."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from kdtree_nb.train.nano.cli_target import STANDARD_LIBRARY, read_corpus
from kdtree_nb.train.nano.continuations import Plan, generate
from kdtree_nb.train.nano.export import folder_fingerprint, load_plain


def main(step: str, argv: list[str], prog: str) -> None:
    """Generate what is missing."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    add = parser.add_argument
    add("--target", type=Path, required=True, help="checkpoint folder of the target, with its tokenizer.json")
    add("--out", type=Path, required=True, help="folder of the parts; those that are there stay")
    add("--corpus", default=STANDARD_LIBRARY, help="file made by `train-nano pack`, or stdlib (default)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    add("--texts", type=int, default=Plan.num_texts, help="default: %(default)s")
    add(
        "--part-texts",
        type=int,
        default=Plan.part_texts,
        help="texts of a part, decoded at once (default: %(default)s)",
    )
    add(
        "--total-len", type=int, default=Plan.total_len, help="tokens of a text, prompt included (default: %(default)s)"
    )
    add("--prompt-lens", type=int, nargs="+", default=list(Plan.prompt_lens), help="the parts' prompts take turns with "
        "these lengths")  # fmt: skip
    add("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: expected a GPU that torch can use, found none; use --device cpu")
    plan = Plan(args.texts, args.part_texts, args.total_len, tuple(args.prompt_lens), args.seed)
    corpus = read_corpus(args.corpus, args.target / "tokenizer.json")
    made_by = {"target": folder_fingerprint(args.target), "corpus": corpus.record["streams"]["train"]["sha256"],
               "device": args.device}  # fmt: skip
    generate(load_plain(args.target, torch.device(args.device)), corpus.streams["train"], plan, args.out, made_by)
    print(f"{args.out}: {plan.num_texts} texts of {plan.total_len} tokens in {plan.num_parts} parts")
