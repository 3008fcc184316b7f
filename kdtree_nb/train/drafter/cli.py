"""Step drafter of `kdtree-nb train-nano`: train a DFlash drafter on text of its target; write a checkpoint folder."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import platform
from pathlib import Path
from typing import Any

import torch

from kdtree_nb.errors import CheckpointError
from kdtree_nb.train.drafter.recipe import PRESETS, Preset
from kdtree_nb.train.drafter.record import FILES, write_record
from kdtree_nb.train.drafter.target import fast_dtype, plain_target
from kdtree_nb.train.drafter.trainer import Texts, Trainer
from kdtree_nb.train.nano.continuations import load_continuations
from kdtree_nb.train.nano.export import RECORD, folder_fingerprint, load_plain
from kdtree_nb.train.nano.tokenizer import MASK
from kdtree_nb.train.options import add_run_options, carry_out, device_name, given, parse_run_options


def parse_args(argv: list[str], prog: str) -> argparse.Namespace:
    """Options of the step."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    add = parser.add_argument
    presets = "; ".join(f"{name}: {preset.purpose}" for name, preset in PRESETS.items())
    add("--target", type=Path, required=True, help="checkpoint folder of the target")
    add("--texts", type=Path, required=True, help="folder made by `train-nano generate` with this target")
    add("--out", type=Path, required=True, help=f"folder to write: {', '.join(FILES)}, {RECORD}")
    add("--preset", choices=PRESETS, default="cpu", help=f"default: cpu. {presets}")
    add("--batch-texts", type=int, help="texts a step, instead of the preset's")
    add("--anchors", type=int, help="blocks of each text in a step, instead of the preset's")
    add("--window", type=int, help="how far back the drafter sees (default: everything)")
    add("--mask-token", type=int, default=MASK, help="id that stands for tokens to be drafted (default: %(default)s)")
    add("--recompute", action="store_true", help="compute hidden states in every step instead of keeping those of all "
        "texts in memory")  # fmt: skip
    add_run_options(parser)
    return parse_run_options(parser, argv)


def main(step: str, argv: list[str], prog: str) -> None:
    """Train and write."""
    args = parse_args(argv, prog)
    trainer = make_trainer(args, chosen_preset(args))
    args.out.mkdir(parents=True, exist_ok=True)  # rather an error now than behind the training
    if carry_out(trainer, args):
        finish(trainer, args.out, f"{prog} {' '.join(argv)}", folder_fingerprint(args.target))


def chosen_preset(args: argparse.Namespace) -> Preset:
    """The preset with what the command line changes."""
    preset = PRESETS[args.preset]
    changes = given(args, num_steps="steps", batch_texts="batch_texts", anchors="anchors", seed="seed")
    shape = dataclasses.replace(preset.shape, window=args.window)
    return dataclasses.replace(preset, shape=shape, recipe=dataclasses.replace(preset.recipe, **changes))


def make_trainer(args: argparse.Namespace, preset: Preset) -> Trainer:
    """With target and texts, which must belong together."""
    device, fingerprint = torch.device(args.device), folder_fingerprint(args.target)
    found = load_continuations(args.texts)
    if found.metadata.get("target") != fingerprint:
        raise CheckpointError(
            f"drafter: {args.texts}: expected texts of the target {args.target}, got those of another; make them: "
            "kdtree-nb train-nano generate"
        )
    model = load_plain(args.target, device)
    config = preset.shape.config(model.config, args.mask_token)
    digest = json.dumps(found.metadata, sort_keys=True)
    texts = Texts(torch.from_numpy(found.tokens), torch.from_numpy(found.prompt_len), digest)
    target = plain_target(model, config.target_layer_ids, fast_dtype(device))
    return Trainer(config, preset.recipe, target, texts, keep_features=not args.recompute)


def finish(trainer: Trainer, folder: Path, command: str, target: str) -> None:
    """Write the folder, weights in bfloat16, and its record."""
    trainer.drafter().save(folder)
    record = make_record(trainer, command, target)
    write_record(folder, record)
    nats = record["train_curve"][-1]["nats_per_token"]
    print(f"{folder}: {record['num_parameters']:,} parameters, {nats:.3f} nats per token at the end, "
          f"{trainer.train_s:.0f} s")  # fmt: skip


def make_record(trainer: Trainer, command: str, target: str) -> dict[str, Any]:
    """Where the weights come from: command, target, texts, recipe, curve."""
    return {
        "command": command,
        "date": datetime.date.today().isoformat(),
        "device": device_name(trainer.target.device),
        "dtype": str(trainer.target.embedding.dtype),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "target": target,
        "texts": json.loads(trainer.texts.digest),
        "recipe": dataclasses.asdict(trainer.recipe),
        "num_parameters": sum(p.numel() for p in trainer.network.parameters()),
        "num_blocks": trainer.step * trainer.recipe.batch_texts * trainer.recipe.anchors,
        "train_s": trainer.train_s,
        "train_curve": trainer.train_curve,
    }
