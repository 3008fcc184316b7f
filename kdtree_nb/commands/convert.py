"""convert: between KDTR, safetensors and checkpoint folders, values bit for bit."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch

    from kdtree_nb.kdtr import Bf16, KdtrFile

HELP = "convert KDTR to safetensors or to a checkpoint folder, or back"
EPILOG = """The names say what is what: FILE.kdtr, FILE.safetensors, or a folder. Quantised weights of a folder become
the float32 values that they stand for, so that the converted model gives the same logits. A tokenizer does not
travel: put its files into a new folder before `generate` reads it.

example:
  kdtree-nb convert data/tiny.kdtr tiny-checkpoint/"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("source", type=Path, help="a .kdtr or .safetensors file, or a checkpoint folder")
    parser.add_argument("target", type=Path, help="the file or folder to write; one of the two is KDTR")
    parser.add_argument("--force", action="store_true", help="overwrite the target if it exists")


def run(args: argparse.Namespace) -> int:
    """Convert in the direction that the names say."""
    from kdtree_nb.kdtr import from_safetensors, to_safetensors

    convert = {
        (".kdtr", ".safetensors"): to_safetensors, (".safetensors", ".kdtr"): from_safetensors,
        (".kdtr", "folder"): _to_folder, ("folder", ".kdtr"): _from_folder,
    }.get((_kind(args.source), _kind(args.target)))  # fmt: skip
    if convert is None:
        raise ValueError(
            "expected one file name that ends in .kdtr and one in .safetensors (or a folder), got "
            f"{args.source.name} and {args.target.name}"
        )
    if args.target.exists() and not args.force:
        raise ValueError(f"{args.target} exists; give --force to overwrite it")
    convert(args.source, args.target)
    print(_summary(args.source, args.target))
    return 0


def _kind(path: Path) -> str:
    """The suffix, or 'folder'; names of checkpoints end in version numbers, as in K2.6."""
    return "folder" if path.is_dir() or not path.suffix or path.suffix[1:].isdecimal() else path.suffix


def _summary(source: Path, target: Path) -> str:
    from kdtree_nb.kdtr import open_kdtr

    file = open_kdtr(target if target.suffix == ".kdtr" else source)
    files = list(target.iterdir()) if target.is_dir() else [target]
    return f"{target}: {len(file.names)} tensors, {sum(f.stat().st_size for f in files):,} bytes"


def _to_folder(source: Path, target: Path) -> None:
    from kdtree_nb.config import ModelConfig
    from kdtree_nb.errors import CheckpointError
    from kdtree_nb.hf.byte_tokenizer import byte_tokenizer_json
    from kdtree_nb.hf.write import write_folder
    from kdtree_nb.kdtr import open_kdtr

    file = open_kdtr(source)
    fields = file.metadata.get("config")
    if not isinstance(fields, dict):
        raise CheckpointError(f"convert: {source}: expected a model's config in the metadata, got {fields!r}")
    write_folder(ModelConfig.from_dict(fields), lambda name: _tensor(file, name), target)
    tokenizer = target / "tokenizer.json"
    if file.metadata.get("tokenizer") == "bytes" and not tokenizer.exists():
        tokenizer.write_text(byte_tokenizer_json(), encoding="utf-8")


def _tensor(file: KdtrFile, name: str) -> torch.Tensor:
    import torch

    value = torch.from_numpy(file.array(name).copy())
    return value.view(torch.bfloat16) if file.dtype(name) == "bf16" else value


def _from_folder(source: Path, target: Path) -> None:
    import torch

    from kdtree_nb.hf import CheckpointFolder, read_config
    from kdtree_nb.hf.tensors import check_tensors, weights
    from kdtree_nb.kdtr import write_kdtr
    from kdtree_nb.model.source import FolderSource

    config, folder = read_config(source), CheckpointFolder(source)
    check_tensors(config, folder)
    read = FolderSource(config, folder, torch.device("cpu"), torch.float32)
    tensors: dict[str, np.ndarray | Bf16] = {}
    for name, shape in weights(config.model):
        entry = folder.entries.get(config.prefix + name)
        tensors[name] = _array(read(name, *shape), entry is not None and entry.dtype == "BF16")
    fields = json.loads((source / "config.json").read_text(encoding="utf-8"))
    write_kdtr(target, tensors, {"config": config.model.to_dict(), "made_from": fields})


def _array(value: torch.Tensor, is_bf16: bool) -> np.ndarray | Bf16:
    import torch

    from kdtree_nb.kdtr import Bf16

    return Bf16(value.bfloat16().view(torch.uint16).numpy()) if is_bf16 else value.contiguous().numpy()
