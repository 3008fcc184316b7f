"""The trained target as a checkpoint folder that `load_model` and `transformers` read, and back into PyTorch."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch

from kdtree_nb.hf import CheckpointFolder, read_config
from kdtree_nb.hf.tensors import weights
from kdtree_nb.hf.write import write_folder
from kdtree_nb.kdtr import write_atomically
from kdtree_nb.model.source import FolderSource
from kdtree_nb.train.nano.tokenizer import SPECIAL_TOKENS
from kdtree_nb.train.plain_model import PlainModel, export_tensors, import_tensors

RECORD = "training.json"
"""What the folder's weights come from: command, corpus, recipe, curves, figures."""

MAX_SHARD_BYTES = 24 << 20
"""Counted in float32, so that shards of bfloat16 stay below 16 MiB."""


def round_weights(model: PlainModel) -> None:
    """Round every weight to bfloat16, in place, but for the routers' biases, which stay as they are."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).to(torch.float32)


def export_model(model: PlainModel, folder: Path, tokenizer_path: Path) -> None:
    """Write config.json, the weights in bfloat16 (the model's are to be rounded) and the tokenizer."""
    tensors = export_tensors(model)
    for old in folder.glob("model-*.safetensors"):
        old.unlink()

    def read(name: str) -> torch.Tensor:
        value = torch.from_numpy(tensors[name])
        return value if name.endswith("e_score_correction_bias") else value.to(torch.bfloat16)

    write_folder(model.config, read, folder, MAX_SHARD_BYTES)
    if tokenizer_path.resolve() != (folder / "tokenizer.json").resolve():
        shutil.copyfile(tokenizer_path, folder / "tokenizer.json")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL_TOKENS[0]}
    write_atomically(folder / "tokenizer_config.json", [json.dumps(settings, indent=1).encode() + b"\n"])


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Write the record, with size and SHA-256 of every file beside it that `export_model` wrote."""
    names = ["config.json", "tokenizer.json", *sorted(path.name for path in folder.glob("model*.safetensors*"))]
    files = {name: {"bytes": (folder / name).stat().st_size, "sha256": file_hash(folder / name)} for name in names}
    write_atomically(folder / RECORD, [json.dumps(record | {"files": files}, indent=1).encode() + b"\n"])


def load_plain(folder: Path, device: torch.device) -> PlainModel:
    """The PyTorch model of a checkpoint folder. Raises CheckpointError as `load_model` does."""
    config = read_config(folder)
    stored = CheckpointFolder(folder)
    source = FolderSource(config, stored, torch.device("cpu"), torch.float32)
    tensors = {name: source.float32(name, *shape).numpy() for name, shape in weights(config.model)}
    stored.close()
    model = PlainModel(config.model)
    import_tensors(model, tensors)
    return model.to(device).eval().requires_grad_(False)


def folder_fingerprint(folder: Path) -> str:
    """SHA-256 over the hashes of the weights' files, in order of name."""
    whole = "".join(file_hash(path) for path in sorted(folder.glob("model*.safetensors")))
    return hashlib.sha256(whole.encode()).hexdigest()


def file_hash(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
