"""CheckpointFolder: the tensors of a folder's safetensors files by name, memory-mapped, one shard open at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from kdtree_nb.errors import CheckpointError
from kdtree_nb.hf.json_file import read_object

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

DTYPES = {
    "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
"""Types of tensors that are read, by their names in safetensors headers."""

MAX_NAME = 255
"""Most characters of a shard's name; file systems have no longer ones."""

_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "consolidated.00.pth")


class Entry(NamedTuple):
    """Where a tensor lies and what it is: shard's file name, dtype as in the header, shape."""

    shard: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        size = DTYPES[self.dtype].itemsize if self.dtype in DTYPES else 0
        for n in self.shape:
            size *= n
        return size


class CheckpointFolder:
    """Names, shapes, dtypes and values of a folder's tensors.

    All headers are read at once, so that a damaged or missing shard is found before anything is loaded. Raises
    CheckpointError that names the file, the tensor, what was found and what was expected.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: dict[str, Entry] = {}
        self._open_name, self._open_shard = "", None
        index = folder / INDEX
        if index.is_file():
            self._read_index(index)
        elif (folder / SINGLE).is_file():
            self.entries = self._header(SINGLE)
        else:
            raise CheckpointError(f"load_model: {folder}: expected {SINGLE} or {INDEX}, {_instead(folder)}")

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, mapped from its file: it must not be changed, and keeps the file mapped while it lives."""
        entry = self.entry(name)
        if entry.dtype not in DTYPES:
            raise CheckpointError(
                f"load_model: {self.folder / entry.shard}: tensor {name!r}: expected one of {sorted(DTYPES)}, got "
                f"{entry.dtype}"
            )
        return self._shard(entry.shard).get_tensor(name)

    def entry(self, name: str) -> Entry:
        """Raises CheckpointError for a name that no shard has."""
        if name not in self.entries:
            raise CheckpointError(f"load_model: {self.folder}: expected a tensor {name!r}, got none of that name")
        return self.entries[name]

    def shards(self) -> dict[str, int]:
        """Bytes of tensors by shard."""
        sizes: dict[str, int] = {}
        for entry in self.entries.values():
            sizes[entry.shard] = sizes.get(entry.shard, 0) + entry.num_bytes
        return sizes

    def close(self) -> None:
        """Let go of the open shard. Tensors that were read stay valid."""
        self._open_name, self._open_shard = "", None

    def _shard(self, name: str) -> Any:
        if name != self._open_name:
            self.close()
            path = self.folder / name
            try:
                self._open_shard = safe_open(path, framework="pt", device="cpu").__enter__()
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"load_model: {path}: expected a whole safetensors file, got {error}") from error
            self._open_name = name
        return self._open_shard

    def _header(self, shard: str) -> dict[str, Entry]:
        file = self._shard(shard)
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        return {name: Entry(shard, s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}

    def _read_index(self, index: Path) -> None:
        placed = _weight_map(index)
        by_shard: dict[str, list[str]] = {}
        for name, shard in placed.items():
            by_shard.setdefault(shard, []).append(name)
        for shard, names in by_shard.items():
            _check_shard_name(index, shard)
            if not (self.folder / shard).is_file():
                raise CheckpointError(
                    f"load_model: {index}: expected a file {shard!r} beside it, as for tensor {names[0]!r}, got none; "
                    "fetch the missing shard"
                )
            header = self._header(shard)
            for name in names:
                if name not in header:
                    raise CheckpointError(
                        f"load_model: {self.folder / shard}: expected tensor {name!r} as {INDEX} says, got none"
                    )
            unlisted = sorted(set(header) - set(names))
            if unlisted:
                raise CheckpointError(
                    f"load_model: {self.folder / shard}: expected the tensors of {INDEX} only, got {unlisted[0]!r} too"
                )
            self.entries.update(header)


def _weight_map(index: Path) -> dict[str, str]:
    placed = read_object(index, "load_model").get("weight_map")
    if not isinstance(placed, dict) or not placed or not all(isinstance(s, str) for s in placed.values()):
        raise CheckpointError(
            f"load_model: {index}: weight_map: expected names of tensors to files, got {placed!r:.80}"
        )
    return placed


def _check_shard_name(index: Path, shard: str) -> None:
    if Path(shard).name != shard or not shard.endswith(".safetensors") or "\\" in shard or len(shard) > MAX_NAME:
        raise CheckpointError(
            f"load_model: {index}: expected names of safetensors files beside it, got {shard!r:.300}; nothing "
            "outside the folder is read"
        )


def _instead(folder: Path) -> str:
    if not folder.is_dir():
        return "got no folder"
    pickled = [name for name in _PICKLED if (folder / name).exists()]
    if pickled:
        return (
            f"got {pickled[0]}: pickled weights can run code and are not read; save the model as safetensors first "
            "(save_pretrained of a current transformers does)"
        )
    found = sorted(path.name for path in folder.iterdir())[:5]
    return f"got {found or 'an empty folder'}"
