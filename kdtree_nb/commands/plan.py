"""plan: what a checkpoint folder would need, before anything is loaded."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdtree_nb.commands import common

if TYPE_CHECKING:
    from kdtree_nb.config import ModelConfig
    from kdtree_nb.hf.plan import Plan

HELP = "say what a checkpoint folder needs, before anything is loaded"
EPILOG = """example:
  kdtree-nb plan checkpoints/Kimi-K2.6 --tokens 131072 --memory-gib 141"""

GIB = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("folder", type=Path, help="a checkpoint folder on this machine; its config.json is enough")
    parser.add_argument("--dtype", choices=common.DTYPES, default="bfloat16", help="default: bfloat16")
    parser.add_argument(
        "--tokens", type=int, default=4096, metavar="N", help="of the cache, all streams together (default: 4096)"
    )
    parser.add_argument("--memory-gib", type=float, metavar="GIB", help="of one device (default: this machine's)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Read config.json and print the plan."""
    from kdtree_nb.hf import read_config
    from kdtree_nb.hf.plan import make_plan

    if args.tokens < 1:
        raise ValueError(f"--tokens: expected a positive integer, got {args.tokens}")
    if args.memory_gib is not None and not 0 < args.memory_gib < 1 << 20:
        raise ValueError(f"--memory-gib: expected a positive number, got {args.memory_gib}")
    config = read_config(args.folder)
    plan = make_plan(config, 4 if args.dtype == "float32" else 2)
    name, memory = _device() if args.memory_gib is None else ("given", int(args.memory_gib * GIB))
    fields = _fields(plan, config.model, args.tokens, name, memory)
    if args.json:
        print(json.dumps(fields))
    else:
        common.write_text(_table(plan, fields))
    return 0


def _device() -> tuple[str, int]:
    """Name and bytes of memory of the first GPU, or of this machine without one."""
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return properties.name, properties.total_memory
    return "this machine's memory", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _fields(plan: Plan, model: ModelConfig, num_tokens: int, device: str, memory: int) -> dict[str, Any]:
    num_ranks = plan.num_ranks(memory, num_tokens, model.num_attention_heads)
    return {
        "parameters": plan.num_parameters,
        "bytes": plan.num_bytes,
        "parts": [
            {"part": p.name, "dtype": p.dtype, "parameters": p.num_parameters, "bytes": p.num_bytes}
            for p in plan.parts
        ],
        "cache_bytes_per_token": plan.cache_bytes_per_token,
        "int4_layer_bytes": plan.int4_layer_bytes,
        "tokens": num_tokens,
        "device": device,
        "device_bytes": memory,
        "tensor_parallel_size": num_ranks,
        "bytes_per_rank": plan.bytes_per_rank(num_ranks, num_tokens) if num_ranks else None,
        "max_tokens": plan.max_tokens(memory, num_ranks) if num_ranks else 0,
    }  # fmt: skip


def _table(plan: Plan, fields: dict[str, Any]) -> str:
    lines = [f"{'part':20} {'dtype':9} {'parameters':>18} {'GiB':>10}"]
    for p in plan.parts:
        lines.append(f"{p.name:20} {p.dtype:9} {p.num_parameters:>18,} {p.num_bytes / GIB:>10.2f}")
    lines.append(f"{'all':30} {plan.num_parameters:>18,} {plan.num_bytes / GIB:>10.2f}")
    cache = fields["tokens"] * plan.cache_bytes_per_token
    lines.append(
        f"latent cache: {plan.cache_bytes_per_token:,} bytes a token, {cache / GIB:.2f} GiB for {fields['tokens']:,}"
    )
    if plan.int4_layer_bytes:
        lines.append(
            f"not counted below: a layer's INT4 experts as floats while they are used, up to "
            f"{plan.int4_layer_bytes / GIB:.2f} GiB over all ranks; a GPU needs none in bfloat16"
        )
    where, num_ranks = f"{fields['device']} ({fields['device_bytes'] / GIB:.1f} GiB)", fields["tensor_parallel_size"]
    if num_ranks is None:
        lines.append(f"{where}: does not fit, not even split over eight such devices")
    else:
        each = fields["bytes_per_rank"] / GIB
        split = "fits" if num_ranks == 1 else f"fits split over {num_ranks} of them (tensor parallel)"
        lines.append(f"{where}: {split}, {each:.2f} GiB each; room for {fields['max_tokens']:,} tokens")
    return "\n".join(lines) + "\n"
