"""Checkpoints of a training run: every tensor bit for bit, squeezed without loss, in files of at most 16 MiB.

A float's exponents repeat and its lowest bits do not: all first bytes of a tensor, then all second bytes, and so on,
compress by about a fifth, which whole floats hardly do.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kdtree_nb.errors import CheckpointError
from kdtree_nb.kdtr import write_atomically

MAX_FILE_BYTES = 16 << 20
TABLE = "checkpoint.json"
"""Written last: a folder without it is not a checkpoint."""

_PLACE = re.compile("step-[0-9]+")


def save_checkpoint(folder: Path, step: int, tensors: Mapping[str, torch.Tensor], state: dict[str, Any]) -> Path:
    """Write the checkpoint of `step` into folder/step-NNNNNN and remove older ones. `state` is JSON-ready."""
    place = folder / f"step-{step:06d}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    entries, squeezed = [], []
    for name, tensor in tensors.items():
        squeezed.append(_squeeze(tensor))
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append({"name": name, "dtype": dtype, "shape": list(tensor.shape), "bytes": len(squeezed[-1])})
    whole, files = b"".join(squeezed), []
    for start in range(0, len(whole), MAX_FILE_BYTES):
        piece = whole[start : start + MAX_FILE_BYTES]
        files.append({"name": f"part-{len(files):02d}.bin", "sha256": hashlib.sha256(piece).hexdigest()})
        write_atomically(place / files[-1]["name"], [piece])
    table = {"step": step, "state": state, "tensors": entries, "files": files}
    write_atomically(place / TABLE, [json.dumps(table).encode() + b"\n"])
    for other in _places(folder):
        if other != place:
            shutil.rmtree(other)
    return place


def _places(folder: Path) -> list[Path]:
    """The folders of checkpoints, complete or not."""
    return [path for path in folder.glob("step-*") if _PLACE.fullmatch(path.name) and path.is_dir()]


def latest_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step below `folder`, if any."""
    found = [place for place in _places(folder) if (place / TABLE).is_file()]
    return max(found, key=lambda place: int(place.name.partition("-")[2]), default=None)


def load_checkpoint(place: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(tensors by name, state) of one checkpoint. Raises CheckpointError that names the file when one is damaged."""
    try:
        table = json.loads((place / TABLE).read_bytes())
        whole = b"".join(_read_part(place / file["name"], file["sha256"]) for file in table["files"])
        tensors, at = {}, 0
        for entry in table["tensors"]:
            data = whole[at : at + entry["bytes"]]
            tensors[entry["name"]] = _expand(data, getattr(torch, entry["dtype"]), entry["shape"])
            at += entry["bytes"]
        return tensors, table["state"]
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError, zlib.error) as error:
        raise CheckpointError(
            f"checkpoint: {place / TABLE}: expected the table of a checkpoint, got {type(error).__name__}: {error}; "
            f"remove {place} to begin anew"
        ) from error


def _read_part(path: Path, sha256: str) -> bytes:
    data = path.read_bytes() if path.is_file() else b""
    if hashlib.sha256(data).hexdigest() != sha256:
        raise CheckpointError(f"checkpoint: {path}: expected a file of hash {sha256[:12]}, got {len(data)} other bytes")
    return data


def _squeeze(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    planes = flat.view(torch.uint8).view(flat.numel(), flat.element_size()).T.contiguous()
    return zlib.compress(planes.numpy().tobytes(), 1)


def _expand(data: bytes, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    planes = np.frombuffer(zlib.decompress(data), np.uint8).reshape(dtype.itemsize, -1)
    return torch.from_numpy(planes.T.copy()).view(-1).view(dtype).view(shape)
