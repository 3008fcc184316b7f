"""Where a model's weights come from: by name and shape, as torch tensors of one dtype on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import torch

from kdtree_nb.errors import CheckpointError
from kdtree_nb.hf import CheckpointFolder, HfConfig
from kdtree_nb.hf.dequantize import NIBBLES_PER_WORD, dequantize_fp8, dequantize_int4
from kdtree_nb.hf.quantization import Int4Groups
from kdtree_nb.hf.rotary_rows import plain_rows, to_neox
from kdtree_nb.hf.tensors import is_int4
from kdtree_nb.kdtr import KdtrFile
from kdtree_nb.model.share import Part, Range, check_group_size


class Source(Protocol):
    """Reads tensors under the names of DeepSeek checkpoints, rotary parts in NeoX order (i, i + R/2).

    keeps_words: INT4 weights stay as a checkpoint stores them even where the products read packed ones
    """

    device: torch.device
    dtype: torch.dtype
    keeps_words: bool

    def __call__(self, name: str, *shape: int, part: Part | None = None) -> torch.Tensor:
        """The tensor of `shape`, or a part of it, on `device` in `dtype`. Raises CheckpointError if it is missing or
        has another shape."""

    def float32(self, name: str, *shape: int) -> torch.Tensor:
        """The same in float32, for what is never rounded."""

    def int4(self, name: str, *shape: int, part: Part | None = None) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Where a weight [N, K] is INT4: its words i32 [N, K/8] and scales, f32 or bf16 [N, K/group], of the part that
        is wanted; else None."""


class ArraySource:
    """Float32 arrays by name: of a KDTR file, or in memory."""

    keeps_words = False

    def __init__(
        self, read: Callable[[str], np.ndarray], names: frozenset[str], where: str, device: torch.device,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self._read, self._names, self._where = read, names, where
        self.device, self.dtype = device, dtype

    @classmethod
    def of_file(cls, file: KdtrFile, device: torch.device, dtype: torch.dtype) -> ArraySource:
        """The tensors of a KDTR file."""
        return cls(file.float32, frozenset(file.names), str(file.path), device, dtype)

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, np.ndarray], device: torch.device, dtype: torch.dtype) -> ArraySource:
        """Arrays in memory."""
        return cls(arrays.__getitem__, frozenset(arrays), "weights", device, dtype)

    def __call__(self, name: str, *shape: int, part: Part | None = None) -> torch.Tensor:
        return self._array(name, shape, part).to(self.dtype)

    def float32(self, name: str, *shape: int) -> torch.Tensor:
        """The array as it is, in float32."""
        return self._array(name, shape, None)

    def _array(self, name: str, shape: tuple[int, ...], part: Part | None) -> torch.Tensor:
        if name not in self._names:
            raise CheckpointError(f"load_model: {self._where}: expected a tensor {name!r}, got none of that name")
        array = self._read(name)
        if array.shape != shape:
            raise CheckpointError(f"load_model: tensor {name!r}: expected shape {shape}, got {tuple(array.shape)}")
        if part is not None:
            array = array[(slice(None),) * part.dim + (slice(*part.range),)]
        return torch.from_numpy(np.array(array, dtype=np.float32)).to(self.device)

    def int4(self, name: str, *shape: int, part: Part | None = None) -> None:
        """Arrays are never INT4."""


class FolderSource:
    """The tensors of a checkpoint folder, dequantised, with rotary rows moved into NeoX order.

    on_bytes: told the bytes of every tensor that was read
    """

    keeps_words = False

    def __init__(
        self, config: HfConfig, folder: CheckpointFolder, device: torch.device, dtype: torch.dtype,
        on_bytes: Callable[[int], object] = lambda num_bytes: None,
    ) -> None:  # fmt: skip
        self.config, self.folder, self.device, self.dtype = config, folder, device, dtype
        self._on_bytes = on_bytes

    def __call__(self, name: str, *shape: int, part: Part | None = None) -> torch.Tensor:
        return self._read(name, shape, self.dtype, part)

    def float32(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor in float32."""
        return self._read(name, shape, torch.float32, None)

    def int4(self, name: str, *shape: int, part: Part | None = None) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The words and scales of an INT4 weight, or None. Raises ValueError for a part that cuts a group."""
        name = self.config.prefix + name
        if not is_int4(self.config, self.folder, name):
            return None
        layer = name.removesuffix(".weight")
        words, groups = int4_parts(name, self.config.quantization, part)
        scale = self._move(f"{layer}.weight_scale", groups)
        return self._move(f"{layer}.weight_packed", words), scale.float() if scale.dtype == torch.float16 else scale

    def _read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, part: Part | None) -> torch.Tensor:
        value = self._load(self.config.prefix + name, dtype, part)
        expected = tuple(part.range.length if part and part.dim == dim else size for dim, size in enumerate(shape))
        if tuple(value.shape) != expected:
            raise CheckpointError(f"load_model: tensor {name!r}: expected shape {expected}, got {tuple(value.shape)}")
        num_plain = plain_rows(self.config.model, name)
        if num_plain is None or not self.config.is_interleaved:
            return value
        return to_neox(value, num_plain, self.config.model.qk_rope_head_dim)

    def _load(self, name: str, dtype: torch.dtype, part: Part | None) -> torch.Tensor:
        found = self.int4(name.removeprefix(self.config.prefix), part=part)
        if found is not None:
            return dequantize_int4(*found, dtype)
        scale = f"{name}_scale_inv"
        if scale in self.folder.entries:
            whole = dequantize_fp8(self._move(name), self._move(scale), self.config.quantization, dtype)
            return cut(whole, part)  # blocks need not end where parts do
        return self._move(name, part).to(dtype)

    def _move(self, name: str, part: Part | None = None) -> torch.Tensor:
        """A stored tensor or a part of it. Only that is copied from the file, which is mapped."""
        value = self.folder.tensor(name)
        value = cut(value, part).to(self.device)
        self._on_bytes(self.folder.entry(name).num_bytes)
        return value


def cut(value: torch.Tensor, part: Part | None) -> torch.Tensor:
    """The part of a tensor, in memory of its own; the tensor itself where all of it is meant."""
    if part is None or part.range.length == value.shape[part.dim]:
        return value
    return value.narrow(part.dim, part.range.begin, part.range.length).clone()


def int4_parts(name: str, groups: Int4Groups, part: Part | None) -> tuple[Part | None, Part | None]:
    """The part of an INT4 weight [N, K] as that of its words [N, K/8] and of its scales [N, K/group]."""
    if part is None or part.dim == 0:
        return part, part
    check_group_size(name, groups.group_size, part.range)
    begin, end = part.range
    words, scales = (Range(begin // size, end // size) for size in (NIBBLES_PER_WORD, groups.group_size))
    return Part(1, words), Part(1, scales)
