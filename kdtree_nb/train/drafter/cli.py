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
from kdtree_nb.kdtr import write_atomically
from kdtree_nb.train.drafter.recipe import PRESETS, Preset
from kdtree_nb.train.drafter.target import fast_dtype, plain_target
from kdtree_nb.train.drafter.trainer import Texts, Trainer
from kdtree_nb.train.nano.continuations import load_continuations
from kdtree_nb.train.nano.export import RECORD, file_hash, folder_fingerprint, load_plain
from kdtree_nb.train.nano.tokenizer import MASK

FILES = ("config.json", "model.safetensors")


def parse_args(argv: list[str], prog: str) -> argparse.Namespace:
    """Options of the step."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    add = parser.add_argument
    presets = "; ".join(f"{name}: {preset.purpose}" for name, preset in PRESETS.items())
    add("--target", type=Path, required=True, help="checkpoint folder of the target")
    add("--texts", type=Path, required=True, help="folder made by `train-nano generate` with this target")
    add("--out", type=Path, required=True, help=f"folder to write: {', '.join(FILES)}, {RECORD}")
    add("--preset", choices=PRESETS, default="cpu", help=f"default: cpu. {presets}")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    add("--steps", type=int, help="length of the schedule, instead of the preset's")
    add("--batch-texts", type=int, help="texts a step, instead of the preset's")
    add("--anchors", type=int, help="blocks of each text in a step, instead of the preset's")
    add("--window", type=int, help="how far back the drafter sees (default: everything)")
    add("--mask-token", type=int, default=MASK, help="id that stands for tokens to be drafted (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--checkpoints", type=Path, help="folder for checkpoints; a run that finds one goes on from it")
    add("--checkpoint-every", type=int, default=0, metavar="STEPS", help="beside the one at the end")
    add("--stop-at", type=int, metavar="STEP", help="stop there with a checkpoint; the schedule is still --steps long")
    add("--threads", type=int, default=1, help="on cpu; more wait for each other on these small matrices (default: 1)")
    add("--recompute", action="store_true", help="compute hidden states in every step instead of keeping those of all "
        "texts in memory")  # fmt: skip
    add("--no-compile", action="store_true", help="on cuda: do not compile layers")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: expected a GPU that torch can use, found none; use --device cpu")
    if args.stop_at is not None and args.checkpoints is None:
        parser.error("--stop-at: expected --checkpoints FOLDER to go on from")
    return args


def main(step: str, argv: list[str], prog: str) -> None:
    """Train and write."""
    args = parse_args(argv, prog)
    if args.device == "cpu":
        torch.set_num_threads(args.threads)
    trainer = make_trainer(args, chosen_preset(args))
    if args.checkpoints is not None and trainer.resume(args.checkpoints):
        print(f"{args.checkpoints}: going on from step {trainer.step}")
    if args.device == "cuda" and not args.no_compile:
        trainer.compile()
    num_steps = trainer.recipe.num_steps
    trainer.run(num_steps if args.stop_at is None else min(args.stop_at, num_steps), args.checkpoints,
                args.checkpoint_every)  # fmt: skip
    if trainer.step < num_steps:
        print(f"{args.checkpoints}: stopped at step {trainer.step} of {num_steps}")
        return
    finish(trainer, args.out, f"{prog} {' '.join(argv)}", folder_fingerprint(args.target))


def chosen_preset(args: argparse.Namespace) -> Preset:
    """The preset with what the command line changes."""
    preset = PRESETS[args.preset]
    changes = {"num_steps": args.steps, "batch_texts": args.batch_texts, "anchors": args.anchors, "seed": args.seed}
    given = {name: value for name, value in changes.items() if value is not None}
    shape = dataclasses.replace(preset.shape, window=args.window)
    return dataclasses.replace(preset, shape=shape, recipe=dataclasses.replace(preset.recipe, **given))


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
    record["files"] = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": file_hash(folder / name)} for name in FILES
    }
    write_atomically(folder / RECORD, [json.dumps(record, indent=1).encode() + b"\n"])
    nats = record["train_curve"][-1]["nats_per_token"]
    print(f"{folder}: {record['num_parameters']:,} parameters, {nats:.3f} nats per token at the end, "
          f"{trainer.train_s:.0f} s")  # fmt: skip


def make_record(trainer: Trainer, command: str, target: str) -> dict[str, Any]:
    """Where the weights come from: command, target, texts, recipe, curve."""
    is_cuda = trainer.target.device.type == "cuda"
    device = torch.cuda.get_device_name(trainer.target.device) if is_cuda else f"CPU, {torch.get_num_threads()} threads"
    return {
        "command": command,
        "date": datetime.date.today().isoformat(),
        "device": device,
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
