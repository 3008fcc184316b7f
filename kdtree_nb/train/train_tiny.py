"""Train `tiny`: `python -m kdtree_nb.train.train_tiny --out data/tiny.kdtr --device cuda --seed 0`.

Writes the weights (rounded to bfloat16) and, beside them, `<stem>_training.json`: loss curve, bits per byte on held-out
files, expert load, samples and where all of it came from. Minutes on a GPU; `--steps 5` runs on any CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from kdtree_nb.config import ModelConfig
from kdtree_nb.kdtr import Bf16, expect_writable, write_atomically, write_kdtr
from kdtree_nb.train.corpus import Corpus, load_corpus
from kdtree_nb.train.optimizers import apply_update, lr_share, make_optimizers
from kdtree_nb.train.plain_model import PlainModel, export_tensors, import_tensors
from kdtree_nb.train.streams import measure, next_token_loss, sample_windows

PROGRAM = "python -m kdtree_nb.train.train_tiny"

TINY_CONFIG = ModelConfig(
    vocab_size=256,
    hidden_size=256,
    num_hidden_layers=4,
    first_k_dense_replace=1,
    num_attention_heads=4,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    intermediate_size=512,
    moe_intermediate_size=96,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_shared_experts=1,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    max_position_embeddings=4096,
    norm_topk_prob=True,
    eos_token_ids=(0,),
)

SAMPLE_PROMPTS = (
    "def read_lines(path):\n    ",
    "class Queue:\n    def __init__(self, size):\n        self.size = size\n",
    "import os\nimport sys\n\n",
)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything that decides the result beside the corpus. Rates are peaks of a cosine over `num_steps`."""

    num_steps: int = 1500
    batch_bytes: int = 65536
    context_cycle: tuple[int, ...] = (512, 512, 512, 2048)
    muon_lr: float = 0.02
    adam_lr: float = 4e-3
    router_lr: float = 5e-4
    weight_decay: float = 0.1
    warmup_share: float = 0.03
    final_lr_share: float = 0.02
    balance_weight: float = 0.01
    num_eval_windows: int = 64
    seed: int = 0


def train(
    model: PlainModel, corpus: Corpus, recipe: Recipe, device: torch.device, use_compile: bool
) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Train in place; (train curve, held-out curve), each a list of {step, bits_per_byte, …}."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    train_bytes, heldout_bytes = (torch.from_numpy(np.array(s)).to(device) for s in (corpus.train, corpus.heldout))
    optimizers = make_optimizers(
        model, recipe.muon_lr, recipe.adam_lr, recipe.router_lr, recipe.weight_decay, momentum_dtype=torch.float32
    )
    layers = [torch.compile(layer, dynamic=False) for layer in model.layers] if use_compile else None
    loss_fn: Callable = torch.compile(next_token_loss, dynamic=False) if use_compile else next_token_loss
    generator = torch.Generator().manual_seed(recipe.seed)
    train_curve: list[dict[str, float]] = []
    heldout_curve: list[dict[str, float]] = []
    losses = []
    progress = tqdm(range(recipe.num_steps), desc="training tiny", unit="step", mininterval=1.0)
    for step in progress:
        context = recipe.context_cycle[step % len(recipe.context_cycle)]
        window = sample_windows(train_bytes, max(1, recipe.batch_bytes // context), context + 1, generator)
        logits, _, balances = model(window[:, :-1], dtype, layers)
        loss = loss_fn(logits, window[:, 1:])
        (loss + recipe.balance_weight * torch.stack(balances).sum()).backward()
        apply_update(optimizers, lr_share(step, recipe.num_steps, recipe.warmup_share, recipe.final_lr_share))
        losses.append(loss.detach())
        if len(losses) == max(1, recipe.num_steps // 200) or step + 1 == recipe.num_steps:
            bits = (torch.stack(losses).mean() / math.log(2)).item()
            if not math.isfinite(bits):
                raise FloatingPointError(f"train: expected a finite loss, got {bits} at step {step + 1}")
            train_curve.append({"step": step + 1, "bits_per_byte": bits})
            losses = []
            progress.set_postfix(bits_per_byte=f"{bits:.3f}")
        if (step + 1) % max(1, recipe.num_steps // 20) == 0:
            bits, loads = measure(model, heldout_bytes, dtype, recipe.num_eval_windows)
            spread = {"min_load": min(map(min, loads)), "max_load": max(map(max, loads))}
            heldout_curve.append({"step": step + 1, "bits_per_byte": bits, **spread})
            tqdm.write(json.dumps(heldout_curve[-1]))
    return train_curve, heldout_curve


def final_figures(
    model: PlainModel, corpus: Corpus, device: torch.device, max_windows: int, num_sample_bytes: int
) -> dict[str, Any]:
    """What the rounded weights do, in float32: bits per byte, expert load, greedy samples."""
    streams = [torch.from_numpy(np.array(stream)).to(device) for stream in (corpus.heldout, corpus.train)]
    (heldout, load), (seen, _) = (measure(model, stream, torch.float32, max_windows) for stream in streams)
    samples = []
    for prompt in SAMPLE_PROMPTS:
        text = bytes(model.greedy(list(prompt.encode()), num_sample_bytes)).decode(errors="replace")
        samples.append({"prompt": prompt, "greedy": text})
    return {"heldout_bits_per_byte": heldout, "train_bits_per_byte": seen, "expert_load": load, "samples": samples}


def parse_args(argv: list[str] | None, prog: str = PROGRAM) -> argparse.Namespace:
    """Command line of `main`."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument(
        "--out", type=Path, required=True, help="KDTR file of the weights; <stem>_training.json beside it"
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="default: cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=Recipe.num_steps, help=f"default {Recipe.num_steps}")
    parser.add_argument("--batch-bytes", type=int, default=Recipe.batch_bytes, help=f"default {Recipe.batch_bytes}")
    parser.add_argument("--corpus", type=Path, help="packed by kdtree_nb.train.corpus (default: this interpreter's)")
    parser.add_argument("--eval-windows", type=int, default=Recipe.num_eval_windows, help="windows of 1024 bytes")
    parser.add_argument("--sample-bytes", type=int, default=200, help="length of the greedy samples in the record")
    args = parser.parse_args(argv)
    if args.steps < 1 or args.batch_bytes < 1:
        parser.error(f"--steps and --batch-bytes: expected at least 1, got {args.steps} and {args.batch_bytes}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: expected a GPU that torch can use, found none; use --device cpu")
    return args


def provenance(args: argparse.Namespace, corpus: Corpus, device: torch.device) -> dict[str, Any]:
    """Command, seed, corpus, versions and device of a run."""
    is_cuda = device.type == "cuda"
    return {
        "command": f"python -m kdtree_nb.train.train_tiny --out data/{args.out.name} --device {device.type} "
        f"--seed {args.seed} --steps {args.steps} --batch-bytes {args.batch_bytes}",
        "seed": args.seed,
        "corpus": corpus.record,
        "device": torch.cuda.get_device_name(device) if is_cuda else f"CPU, {torch.get_num_threads()} threads",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
    }


def main(argv: list[str] | None = None, prog: str = PROGRAM) -> None:
    """Train, round, measure and save. prog: the command's name in its help."""
    args = parse_args(argv, prog)
    expect_writable(args.out.parent)
    device = torch.device(args.device)
    recipe = Recipe(args.steps, args.batch_bytes, num_eval_windows=args.eval_windows, seed=args.seed)
    corpus = load_corpus(args.corpus)
    made_by = provenance(args, corpus, device)
    torch.manual_seed(args.seed)
    model = PlainModel(TINY_CONFIG).to(device)
    start_s = time.perf_counter()
    train_curve, heldout_curve = train(model, corpus, recipe, device, use_compile=device.type == "cuda")
    elapsed_s = time.perf_counter() - start_s
    weights = {name: Bf16.round(array) for name, array in export_tensors(model).items()}
    import_tensors(model, {name: weight.float32() for name, weight in weights.items()})
    metadata = {"config": TINY_CONFIG.to_dict(), "tokenizer": "bytes", "made_by": made_by}
    write_kdtr(args.out, weights, metadata)
    record = {
        **made_by,
        "date": datetime.date.today().isoformat(),
        "recipe": dataclasses.asdict(recipe),
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "train_s": elapsed_s,
        "train_curve": train_curve,
        "heldout_curve": heldout_curve,
        "final": final_figures(model, corpus, device, 8 * args.eval_windows, args.sample_bytes),
    }
    path = args.out.with_name(f"{args.out.stem}_training.json")
    write_atomically(path, [json.dumps(record, indent=1).encode() + b"\n"])
    print(f"{args.out}: {record['final']['heldout_bits_per_byte']:.4f} bits per held-out byte, {elapsed_s:.0f} s")


if __name__ == "__main__":
    main()
