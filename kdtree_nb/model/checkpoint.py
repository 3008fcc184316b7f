"""load_model: a KDTR file, a checkpoint folder, or a model that this project ships by name, to a Model."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from tqdm.auto import tqdm

from kdtree_nb.config import ModelConfig
from kdtree_nb.errors import CheckpointError
from kdtree_nb.hf import CheckpointFolder, read_config
from kdtree_nb.hf.tensors import check_tensors
from kdtree_nb.kdtr import open_kdtr
from kdtree_nb.model.build import build
from kdtree_nb.model.hf_tokenizer import find_tokenizer
from kdtree_nb.model.ranks import ONE_RANK, Ranks
from kdtree_nb.model.source import ArraySource, FolderSource, Source
from kdtree_nb.model.transformer import Model
from kdtree_nb.native import require
from kdtree_nb.native.devices import memory_for
from kdtree_nb.tiny2 import tiny2_config, tiny2_weights

DATA_DIR = Path(__file__).resolve().parents[2] / "data"
"""Where the models that this project ships lie."""

NANO = "nano-k2"
"""Name of the trained model with the structure of Kimi K2."""

_SHIPPED = {"tiny": DATA_DIR / "tiny.kdtr", NANO: DATA_DIR / NANO}
"""Name -> where the weights lie."""

DTYPES = (torch.float32, torch.bfloat16)
"""Types of weights and activations that the operations support."""

MIN_PROGRESS_BYTES = 1 << 28
"""Checkpoints of at least this many bytes show a progress bar."""

Report = Callable[[str], None]


def print_to_stderr(message: str) -> None:
    """The default `report`: one line on stderr."""
    print(f"kdtree_nb: {message}", file=sys.stderr, flush=True)


def load_model(
    path_or_name: str | os.PathLike, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32,
    report: Report = print_to_stderr, ranks: Ranks = ONE_RANK,
) -> Model:  # fmt: skip
    """Load a model: a KDTR file, a checkpoint folder of the DeepSeek-V3 family (config.json and safetensors), or by
    name "tiny" (trained on Python text), "tiny2" (random weights, odd sizes) or "nano-k2" (trained on more of it, with
    the structure of Kimi K2).

    Weights are widened exactly to FP32 (or rounded to BF16), fused and packed once, here. `report` is told once which
    tensors of a folder are left aside. ranks: the processes among which the model is split (`kdtree_nb.parallel`);
    each loads its share alone. Raises CheckpointError when there is no model or one that is not understood, KdtrError
    when a file is damaged, ValueError on another dtype and where a dimension does not split, and
    KernelUnavailableError where there are no kernels for the device.
    """
    _check_dtype(dtype)
    require(torch.device(device))
    name = os.fspath(path_or_name)
    if name == "tiny2":
        return build_model(tiny2_config(), tiny2_weights(), device, dtype, ranks)
    path = _SHIPPED.get(name) or Path(name)
    if name == NANO and not (path / "config.json").is_file():
        raise CheckpointError(
            f"load_model: expected the trained weights of {NANO!r} at {path}, found none; train it: "
            "kdtree-nb train-nano target --preset gpu --device cuda --corpus tokens.pack --out data/nano-k2"
        )
    if path.is_dir():
        return _load_folder(path, torch.device(device), dtype, report, ranks)
    if not path.is_file():
        raise CheckpointError(
            "load_model: expected a KDTR file or a checkpoint folder (or the name 'tiny', 'tiny2' or 'nano-k2'), found "
            f"{'no regular file' if path.exists() else 'nothing'} at {path}"
        )
    return _load_kdtr(path, torch.device(device), dtype, ranks)


def build_model(
    config: ModelConfig, weights: Mapping[str, np.ndarray], device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32, ranks: Ranks = ONE_RANK,
) -> Model:  # fmt: skip
    """A model from float32 arrays under the names of DeepSeek checkpoints, rotary rows in NeoX order. Errors as in
    `load_model`."""
    _check_dtype(dtype)
    require(torch.device(device))
    return _build(config, ArraySource.of_arrays(weights, torch.device(device), dtype), ranks)


def _build(config: ModelConfig, read: Source, ranks: Ranks) -> Model:
    what = f"load_model: expected memory for the weights, {read.dtype}"
    with memory_for(what, read.device, "Use torch.bfloat16, a smaller model or another device."):
        model = build(config, read, ranks)
    if ranks.num_ranks > 1:
        ranks.agree("the model (configuration, dtype, weights)", fingerprint(model))
    return model


EMBEDDING_SAMPLE = 256
"""Rows of the embedding that take part in a fingerprint."""


def fingerprint(model: Model) -> str:
    """Configuration, dtype and checksums of what every rank holds whole: norms, routers and rows of the embedding."""
    step = max(1, model.config.vocab_size // EMBEDDING_SAMPLE)
    parts = [model.norm, model.embedding[::step].contiguous()]
    for layer in model.layers:
        for part in (layer.attention, layer.feed_forward):
            parts += [getattr(part, name) for name in ("norm", "kv_norm", "bias") if hasattr(part, name)]
            parts += [part.router.data] if hasattr(part, "router") else []
    sums = [_sums(part) for part in parts if part is not None]
    return json.dumps([model.config.to_dict(), str(model.dtype), sums], sort_keys=True)


def _sums(values: torch.Tensor) -> list[int]:
    """Sums of the bits as integers, and of their squares, modulo 2^64."""
    bits = values.flatten().view(torch.int16 if values.dtype == torch.bfloat16 else torch.int32).long()
    return [int(bits.sum()), int((bits * bits).sum())]


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"load_model: expected dtype torch.float32 or torch.bfloat16, got {dtype}")


def _load_kdtr(path: Path, device: torch.device, dtype: torch.dtype, ranks: Ranks) -> Model:
    file = open_kdtr(path)
    fields = file.metadata.get("config")
    if not isinstance(fields, dict):
        raise CheckpointError(f"load_model: {path}: expected a model's config in the metadata, got {fields!r}")
    return _build(ModelConfig.from_dict(fields), ArraySource.of_file(file, device, dtype), ranks)


def _load_folder(
    path: Path, device: torch.device, dtype: torch.dtype, report: Report, ranks: Ranks
) -> Model:  # fmt: skip
    config, folder = read_config(path), CheckpointFolder(path)
    aside = check_tensors(config, folder)
    if aside:
        report(f"{path}: left aside {len(aside)} tensors that the text model does not use: {_beginnings(aside)}")
    total = sum(entry.num_bytes for name, entry in folder.entries.items() if name not in set(aside))
    show = total >= MIN_PROGRESS_BYTES
    with tqdm(total=total, desc="load", unit="B", unit_scale=True, unit_divisor=1024, disable=not show) as progress:
        try:
            model = _build(config.model, FolderSource(config, folder, device, dtype, progress.update), ranks)
        finally:
            folder.close()
    model.tokenizer = find_tokenizer(path)
    return model


def _beginnings(names: list[str]) -> str:
    """The first components of the names, each once."""
    return ", ".join(sorted({".".join(name.split(".")[: 1 if "layers" not in name else 3]) + ".*" for name in names}))
