"""Step target of `kdtree-nb train-nano`: train, round to bfloat16, measure, and write a checkpoint folder."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import platform
from pathlib import Path
from typing import Any

import torch

from kdtree_nb.train.nano.export import export_model, round_weights, write_record
from kdtree_nb.train.nano.recipe import PRESETS, Preset
from kdtree_nb.train.nano.tokenizer import TOKENIZER_PATH, load_tokenizer
from kdtree_nb.train.nano.tokens import STREAMS, TokenCorpus, check_tokenizer, load_tokens, standard_library_corpus
from kdtree_nb.train.nano.trainer import Trainer
from kdtree_nb.train.options import add_run_options, carry_out, device_name, given, parse_run_options

STANDARD_LIBRARY = "stdlib"
MAX_STANDARD_LIBRARY_BYTES = 4_000_000
"""What a run on the standard library is trained on: more than a minute on a CPU can read once."""

FINAL_WINDOWS_FACTOR = 4
SAMPLE_PROMPTS = ("def read_lines(path):\n    ", "class Queue:\n    def __init__(self, size):\n", "import os\nimport ")
SAMPLE_TOKENS = 48


def parse_args(argv: list[str], prog: str) -> argparse.Namespace:
    """Options of the step."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    add = parser.add_argument
    presets = "; ".join(f"{name}: {preset.purpose}" for name, preset in PRESETS.items())
    add("--out", type=Path, required=True, help="folder to write: config.json, weights, tokenizer.json, training.json")
    add("--preset", choices=PRESETS, default="cpu", help=f"default: cpu. {presets}")
    add("--corpus", default=STANDARD_LIBRARY, help="file made by `train-nano pack`, or stdlib, this interpreter's own "
        "library (default)")  # fmt: skip
    add("--tokenizer", type=Path, default=TOKENIZER_PATH, help="default: %(default)s")
    add("--batch-tokens", type=int, help="tokens a step, instead of the preset's")
    add_run_options(parser)
    return parse_run_options(parser, argv)


def main(step: str, argv: list[str], prog: str) -> None:
    """Train and write."""
    args = parse_args(argv, prog)
    preset = chosen_preset(args)
    args.out.mkdir(parents=True, exist_ok=True)  # rather an error now than behind the training
    corpus = read_corpus(args.corpus, args.tokenizer)
    trainer = Trainer(preset.config, preset.recipe, corpus, torch.device(args.device))
    if carry_out(trainer, args):
        finish(trainer, args.out, args.tokenizer, f"{prog} {' '.join(argv)}")


def chosen_preset(args: argparse.Namespace) -> Preset:
    """The preset with what the command line changes."""
    preset = PRESETS[args.preset]
    changes = given(args, num_steps="steps", batch_tokens="batch_tokens", seed="seed")
    return dataclasses.replace(preset, recipe=dataclasses.replace(preset.recipe, **changes))


def read_corpus(source: str, tokenizer_path: Path) -> TokenCorpus:
    """A packed corpus by path, compared with the tokenizer; or the standard library's."""
    if source == STANDARD_LIBRARY:
        return standard_library_corpus(tokenizer_path, MAX_STANDARD_LIBRARY_BYTES)
    corpus = load_tokens(Path(source))
    check_tokenizer(corpus, tokenizer_path)
    return corpus


def finish(trainer: Trainer, folder: Path, tokenizer_path: Path, command: str) -> None:
    """Round, measure in float32, and write the folder and its record."""
    round_weights(trainer.model)
    export_model(trainer.model, folder, tokenizer_path)
    record = make_record(trainer, tokenizer_path, command)
    write_record(folder, record)
    code = record["final"]["bits_per_byte"]["code"]
    print(f"{folder}: {record['num_parameters']:,} parameters, {code:.3f} bits per held-out byte of code, "
          f"{trainer.train_s:.0f} s")  # fmt: skip


def make_record(trainer: Trainer, tokenizer_path: Path, command: str) -> dict[str, Any]:
    """Where the weights come from and what they do: curves, bits per byte of every stream, expert loads, samples."""
    bits, loads = {}, {}
    for name in STREAMS:
        bits[name], loads[name] = trainer.evaluate(
            name, FINAL_WINDOWS_FACTOR * trainer.recipe.num_eval_windows, torch.float32
        )
    return {
        "command": command,
        "date": datetime.date.today().isoformat(),
        "device": device_name(trainer.device),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "corpus": trainer.corpus.record,
        "recipe": dataclasses.asdict(trainer.recipe),
        "num_parameters": sum(p.numel() for p in trainer.model.parameters()),
        "num_tokens": trainer.step * trainer.recipe.batch_tokens,
        "train_s": trainer.train_s,
        "train_curve": trainer.train_curve,
        "heldout_curve": trainer.heldout_curve,
        "final": {
            "bits_per_byte": bits,
            "expert_load": loads["code"].tolist(),
            "samples": samples(trainer, tokenizer_path),
        },
    }


def samples(trainer: Trainer, tokenizer_path: Path) -> list[dict[str, str]]:
    """Greedy continuations of a few prompts."""
    tokenizer, found = load_tokenizer(tokenizer_path), []
    for prompt in SAMPLE_PROMPTS:
        ids = trainer.model.greedy(tokenizer.encode(prompt).ids, SAMPLE_TOKENS)
        found.append({"prompt": prompt, "greedy": tokenizer.decode(ids, skip_special_tokens=False)})
    return found
