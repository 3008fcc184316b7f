"""KDTR: a file of named tensors and metadata, for weights, prompts and goldens, readable without a library.

The format, version 1. All integers are little-endian; `align64(n)` is n rounded up to a multiple of 64.

    offset  size  field
         0     8  magic: the bytes 4B 44 54 52 0D 0A 1A 0A ("KDTR", CR, LF, control-Z, LF)
         8     4  version, uint32: 1. A reader refuses every other value
        12     4  header_crc32, uint32: CRC-32 (as in zlib) of bytes 16 up to 24 + header_bytes
        16     8  header_bytes, uint64: length of the JSON text, at most 2^26
        24     …  header: one JSON object in UTF-8
      data     …  data section, data = align64(24 + header_bytes); the gap before it is zeros

The header is {"metadata": {…}, "tensors": {name: {"dtype": …, "shape": […], "offset": …, "bytes": …, "crc32": …}, …}}:
both keys, and all five in each entry, no others; metadata is free.

- No object in it repeats a key, no number is NaN or infinite, objects and lists nest at most 64 deep.
- A name is a non-empty string. `dtype` is one of f64 f32 bf16 f16 i64 i32 i16 i8 u8 bool. A bool is one byte, 0 or 1.
- `shape`: at most 8 non-negative integers; [] is a scalar. Row-major, no padding. product(max(d, 1)) × itemsize < 2^63.
- `bytes` is product(shape) × itemsize; `crc32` is the CRC-32 of these bytes.
- `offset` counts from the data section and is a multiple of 64, so that tensors are 64-byte aligned in a mapped file.
  In order of offset, a tensor that has bytes begins at align64(end of the one before), the first at 0; the gaps are
  zeros. The file ends where the last one ends (where the data section starts when there is none).

A bf16 value is the upper half of the IEEE binary32 value; numpy lacks such a type, so bits travel as uint16 in `Bf16`.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import stat
import struct
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kdtree_nb.errors import KdtrError
from kdtree_nb.kdtr_header import (
    DTYPES,
    MAX_RANK,
    TensorEntry,
    align64,
    decode_header,
    encode_header,
    fail,
    parse_json,
)

_NAMES = {dtype: name for name, dtype in DTYPES.items() if name != "bf16"}
_SAFETENSORS = {"f64": "F64", "f32": "F32", "bf16": "BF16", "f16": "F16", "i64": "I64", "i32": "I32", "i16": "I16",
                "i8": "I8", "u8": "U8", "bool": "BOOL"}  # fmt: skip
_METADATA_KEY = "kdtr_metadata"


class Bf16(NamedTuple):
    """A bfloat16 tensor: its bits, uint16 of any shape. `Bf16.round` makes one from floats, `.float32()` widens it."""

    bits: np.ndarray

    @classmethod
    def round(cls, values: np.ndarray) -> Bf16:
        """Round float32 values of any shape to the nearest bfloat16, ties to even; a NaN stays a (quiet) NaN. Raises
        ValueError for other dtypes."""
        wide = np.asarray(values)
        if wide.dtype != np.float32:
            raise ValueError(f"Bf16.round: expected float32 (a second rounding would not be exact), got {wide.dtype}")
        raw = wide.view(np.uint32).astype(np.uint64)
        rounded = (raw + 0x7FFF + ((raw >> 16) & 1)) >> 16
        return cls(np.where(np.isnan(wide), (raw >> 16) | 0x40, rounded).astype(np.uint16))

    def float32(self) -> np.ndarray:
        """The same values as float32, exactly."""
        return np.asarray(np.asarray(self.bits, np.uint32) << 16).view(np.float32)


def write_kdtr(path: str | os.PathLike, tensors: Mapping[str, np.ndarray | Bf16], metadata: Mapping[str, Any]) -> None:
    """Write tensors and JSON metadata atomically: a reader sees the old file or the whole new one, never a part.

    The same arguments give the same bytes. KdtrError: a name, dtype, rank or metadata value that the format lacks.
    """
    table: dict[str, dict[str, Any]] = {}
    chunks: list[Any] = []
    end = 0
    for name, tensor in tensors.items():
        dtype, array = _plain(path, name, tensor)
        raw = array.reshape(-1).view(np.uint8)
        offset = align64(end) if raw.size else 0
        table[name] = {"dtype": dtype, "shape": list(array.shape), "offset": offset, "bytes": raw.size,
                       "crc32": zlib.crc32(raw)}  # fmt: skip
        if raw.size:
            chunks += [bytes(offset - end), raw]
            end = offset + raw.size
    write_atomically(path, [encode_header(path, dict(metadata), table), *chunks])


def _plain(path: Any, name: Any, tensor: np.ndarray | Bf16) -> tuple[str, np.ndarray]:
    """KDTR dtype and a contiguous little-endian array of a tensor."""
    where = f"tensor {name!r}"
    if not isinstance(name, str) or not name:
        fail(path, where, "name", "a non-empty string", repr(name))
    array = np.asarray(tensor.bits if isinstance(tensor, Bf16) else tensor)
    if isinstance(tensor, Bf16):
        dtype = "bf16" if array.dtype == np.uint16 else None
    else:
        dtype = _NAMES.get(array.dtype.newbyteorder("<"))
    if dtype is None:
        fail(path, where, "dtype", f"one of {' '.join(DTYPES)} (bf16: uint16 in Bf16)", array.dtype)
    if array.ndim > MAX_RANK:
        fail(path, where, "shape", f"at most {MAX_RANK} dimensions", array.ndim)
    return dtype, np.asarray(array, dtype=DTYPES[dtype], order="C")


def expect_writable(folder: Path, option: str = "--out") -> None:
    """Make `folder` and write to it for a moment: rather an error now than behind the work whose result it is to hold.
    Raises ValueError where that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{option}: expected a folder to write to, got {folder} ({error.strerror})") from error


def write_atomically(path: str | os.PathLike, chunks: Iterable[Any]) -> None:
    """Write bytes-like chunks to a temporary file beside `path`, fsync it, rename it to `path`, fsync the folder."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # such as a full disk
            error.filename = str(target)
        raise
    if os.name == "posix":
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class KdtrFile:
    """An open, memory-mapped KDTR file: `.path`, `.metadata` (dict), `.names`; `name in file`, `for name in file`.

    Arrays are read-only views of the mapped file, which stays mapped as long as one of them lives. `write_kdtr` may
    overwrite an open file, since it replaces it; cutting an open file short in place would crash its readers.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        self._map = _map_file(self.path)
        self.metadata, self._entries, self._data_start = decode_header(self.path, self._map)
        self._verified: set[str] = set()

    @property
    def names(self) -> list[str]:
        """Tensor names in the order of the header."""
        return list(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def entry(self, name: str) -> TensorEntry:
        """The table row of a tensor. KdtrError when the file has no such tensor."""
        if name not in self._entries:
            fail(self.path, f"tensor {name!r}", "name", "a tensor of this file", f"none among its {len(self._entries)}")
        return self._entries[name]

    def dtype(self, name: str) -> str:
        """KDTR dtype of a tensor, such as 'bf16'."""
        return self.entry(name).dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self.entry(name).shape

    def array(self, name: str) -> np.ndarray:
        """A read-only, memory-mapped array (bf16: its bits as uint16). The first call for a name checks its CRC-32."""
        entry = self.entry(name)
        if name not in self._verified:
            self._verify(name)
        dtype = DTYPES[entry.dtype]
        if not entry.num_bytes:
            return np.zeros(entry.shape, dtype)
        start = self._data_start + entry.offset_bytes
        return np.frombuffer(self._map, dtype, entry.num_bytes // dtype.itemsize, start).reshape(entry.shape)

    def float32(self, name: str) -> np.ndarray:
        """A tensor of dtype f32, f16 or bf16 as float32, exactly. KdtrError for other dtypes."""
        array, dtype = self.array(name), self.dtype(name)
        if dtype not in ("f32", "f16", "bf16"):
            fail(self.path, f"tensor {name!r}", "dtype", "f32, f16 or bf16", dtype)
        return Bf16(array).float32() if dtype == "bf16" else array.astype(np.float32, copy=False)

    def verify(self) -> None:
        """Check the CRC-32 of every tensor, also of those read before. KdtrError at the first mismatch."""
        for name in self._entries:
            self._verify(name)

    def _verify(self, name: str) -> None:
        entry = self._entries[name]
        start = self._data_start + entry.offset_bytes
        with memoryview(self._map) as whole, whole[start : start + entry.num_bytes] as raw:
            found = zlib.crc32(raw)
            is_bool = entry.dtype != "bool" or not entry.num_bytes or np.frombuffer(raw, np.uint8).max() <= 1
        if found != entry.crc32:
            fail(self.path, f"tensor {name!r}", "CRC-32", f"{entry.crc32:#010x}", f"{found:#010x}: data is damaged")
        if not is_bool:
            fail(self.path, f"tensor {name!r}", "bool bytes", "0 or 1", "another value")
        self._verified.add(name)


def open_kdtr(path: str | os.PathLike) -> KdtrFile:
    """Open a KDTR file for reading. KdtrError when it is missing, no KDTR file, damaged, hostile or too new."""
    return KdtrFile(path)


def _map_file(path: Path) -> mmap.mmap:
    """The whole file, mapped read-only. Refuses what is not a regular file before opening it (a pipe would block)."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            fail(path, "file", "kind", "a regular file", "a folder or device")
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise KdtrError(f"{path}: file: expected a readable, non-empty KDTR file, got {error}") from error


def to_safetensors(source: str | os.PathLike, target: str | os.PathLike) -> None:
    """Convert a KDTR file to safetensors, bit for bit (no library needed); metadata becomes one JSON string in it."""
    file = open_kdtr(source)
    header: dict[str, Any] = {"__metadata__": {_METADATA_KEY: json.dumps(file.metadata)}}
    chunks, end = [], 0
    for name in sorted(file.names, key=lambda name: -DTYPES[file.dtype(name)].itemsize):
        if name == "__metadata__":
            fail(source, f"tensor {name!r}", "name", "another name (safetensors reserves this one)", name)
        raw = file.array(name).reshape(-1).view(np.uint8)
        header[name] = {"dtype": _SAFETENSORS[file.dtype(name)], "shape": list(file.shape(name)),
                        "data_offsets": [end, end + raw.size]}  # fmt: skip
        chunks.append(raw)
        end += raw.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    write_atomically(target, [struct.pack("<Q", len(text)), text, *chunks])


def from_safetensors(source: str | os.PathLike, target: str | os.PathLike) -> None:
    """Convert a safetensors file to KDTR, bit for bit. Needs the package safetensors, which checks the source.

    KdtrError: a broken source, or a dtype that KDTR lacks. The whole file is held in memory meanwhile.
    """
    try:
        import safetensors
    except ImportError as error:
        raise KdtrError("from_safetensors: expected the package safetensors: pip install safetensors") from error
    names = {theirs: ours for ours, theirs in _SAFETENSORS.items()}
    try:
        raw = Path(source).read_bytes()
        found = safetensors.deserialize(raw)
    except (OSError, safetensors.SafetensorError) as error:
        raise KdtrError(f"{source}: file: expected a safetensors file, got {error}") from error
    tensors: dict[str, np.ndarray | Bf16] = {}
    for name, fields in sorted(found, key=lambda item: item[0]):
        if fields["dtype"] not in names:
            fail(source, f"tensor {name!r}", "dtype", f"one of {' '.join(names)}", fields["dtype"])
        dtype = names[fields["dtype"]]
        array = np.frombuffer(fields["data"], DTYPES[dtype]).reshape(fields["shape"])
        tensors[name] = Bf16(array) if dtype == "bf16" else array
    (header_bytes,) = struct.unpack_from("<Q", raw)
    strings = json.loads(raw[8 : 8 + header_bytes]).get("__metadata__", {})
    own = strings.get(_METADATA_KEY)
    metadata = parse_json(source, own.encode()) if own is not None else strings
    if not isinstance(metadata, dict):
        fail(source, "metadata", _METADATA_KEY, "a JSON object", type(metadata).__name__)
    write_kdtr(target, tensors, metadata)
