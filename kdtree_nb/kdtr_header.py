"""The header of a KDTR file: constants and every check that a reader makes before touching data (see kdtr.py)."""

from __future__ import annotations

import json
import math
import struct
import zlib
from typing import Any, NamedTuple, NoReturn

import numpy as np

from kdtree_nb.errors import KdtrError

MAGIC = b"KDTR\r\n\x1a\n"
VERSION = 1
ALIGNMENT = 64
MAX_HEADER_BYTES = 1 << 26
MAX_RANK = 8
MAX_NESTING = 64
PREAMBLE = struct.Struct("<8sIIQ")

_CODES = {"f64": "<f8", "f32": "<f4", "bf16": "<u2", "f16": "<f2", "i64": "<i8", "i32": "<i4", "i16": "<i2"}
DTYPES = {name: np.dtype(code) for name, code in {**_CODES, "i8": "i1", "u8": "u1", "bool": "?"}.items()}
"""KDTR dtype name -> numpy dtype of the array that `KdtrFile.array` returns (bf16: its bits as uint16)."""


class TensorEntry(NamedTuple):
    """One row of the tensor table; `offset_bytes` counts from the start of the data section."""

    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    num_bytes: int
    crc32: int


def align64(num_bytes: int) -> int:
    """`num_bytes` rounded up to a multiple of 64."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def fail(path: Any, where: str, field: str, expected: Any, got: Any) -> NoReturn:
    """Raise the KdtrError of the project's form: file, tensor or part, field, expectation, finding (cut if long)."""
    text = str(got)
    text = text if len(text) <= 200 else text[:200] + " …"
    raise KdtrError(f"{path}: {where}: {field}: expected {expected}, got {text}")


def encode_header(path: Any, metadata: dict[str, Any], table: dict[str, dict[str, Any]]) -> bytes:
    """Preamble, JSON and the gap up to the data section. KdtrError: metadata that JSON would change or refuse."""
    header = {"metadata": metadata, "tensors": table}
    try:
        text = json.dumps(header, allow_nan=False, ensure_ascii=True, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise KdtrError(f"{path}: metadata: expected finite JSON values, got {error}") from error
    if len(text) > MAX_HEADER_BYTES:
        fail(path, "header", "length", f"at most {MAX_HEADER_BYTES} bytes", len(text))
    if parse_json(path, text) != header:
        fail(path, "metadata", "values", "string keys and lists (no tuples), which JSON reads back equal", "others")
    length = struct.pack("<Q", len(text))
    preamble = MAGIC + struct.pack("<II", VERSION, zlib.crc32(text, zlib.crc32(length))) + length
    return (preamble + text).ljust(align64(len(preamble) + len(text)), b"\0")


def decode_header(path: Any, raw: Any) -> tuple[dict[str, Any], dict[str, TensorEntry], int]:
    """(metadata, entries by name, start of the data section) of `raw`, the whole file as a sliceable buffer."""
    if len(raw) < PREAMBLE.size:
        fail(path, "file", "size", f"at least {PREAMBLE.size} bytes (the file may be truncated)", len(raw))
    magic, version, crc32, header_bytes = PREAMBLE.unpack_from(raw)
    if magic != MAGIC:
        fail(path, "file", "magic", repr(MAGIC), repr(magic))
    if version != VERSION:
        remedy = " (written by a newer kdtree_nb: update)" if version > VERSION else ""
        fail(path, "file", "version", VERSION, f"{version}{remedy}")
    limit = min(len(raw) - PREAMBLE.size, MAX_HEADER_BYTES)
    if header_bytes > limit:
        fail(path, "header", "length", f"at most {limit} bytes (the file may be truncated)", header_bytes)
    end = PREAMBLE.size + header_bytes
    found = zlib.crc32(raw[PREAMBLE.size - 8 : end])
    if found != crc32:
        fail(path, "header", "CRC-32", f"{crc32:#010x}", f"{found:#010x}")
    if align64(end) > len(raw):
        fail(path, "file", "size", f"at least {align64(end)} bytes (the file may be truncated)", len(raw))
    header = parse_json(path, raw[PREAMBLE.size : end])
    if not isinstance(header, dict) or sorted(header) != ["metadata", "tensors"]:
        fail(path, "header", "JSON", "an object with the keys metadata and tensors", repr(header)[:200])
    for key, value in header.items():
        if not isinstance(value, dict):
            fail(path, "header", key, "a JSON object", type(value).__name__)
    data_start = align64(end)
    return header["metadata"], _check_table(path, header["tensors"], len(raw) - data_start), data_start


def parse_json(path: Any, text: bytes) -> Any:
    """JSON without duplicate keys, NaN, infinity or nesting beyond MAX_NESTING; else KdtrError."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for key, value in pairs:
            if key in fields:
                fail(path, f"tensor or key {key!r}", "name", "each name once", "a duplicate")
            fields[key] = value
        return fields

    def finite(number: str) -> float:
        value = float(number)
        if not math.isfinite(value):
            fail(path, "header", "number", "a finite value", number)
        return value

    try:
        value = json.loads(text.decode(), object_pairs_hook=unique, parse_constant=finite, parse_float=finite)
    except (ValueError, RecursionError) as error:
        raise KdtrError(f"{path}: header: expected JSON in UTF-8, got {type(error).__name__}: {error}") from error
    if _is_too_deep(value):
        fail(path, "header", "nesting", f"at most {MAX_NESTING} levels", "more")
    return value


def _is_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_NESTING + 1):
        nested = [v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list)]
        if not nested:
            return False
        level = [item for items in nested for item in items]
    return True


def _check_table(path: Any, table: dict[str, Any], data_bytes: int) -> dict[str, TensorEntry]:
    """Entries by name, each checked by itself, against its neighbours and against the file's end."""
    entries = {name: _check_entry(path, name, fields) for name, fields in table.items()}
    filled = [(entry.offset_bytes, entry.num_bytes, name) for name, entry in entries.items() if entry.num_bytes]
    end, last = 0, "the start"
    for start, num_bytes, name in sorted(filled):
        if start < end:
            fail(path, f"tensor {name!r}", "offset", f"no overlap with {last!r}, which ends at {end}", start)
        if start != align64(end):
            fail(path, f"tensor {name!r}", "offset", f"{align64(end)}, the first multiple of 64 after {last!r}", start)
        end, last = start + num_bytes, name
        if end > data_bytes:
            fail(path, f"tensor {name!r}", "end", f"at most {data_bytes} (the file may be truncated)", end)
    if end != data_bytes:
        fail(path, "file", "data section", f"{end} bytes, the end of the last tensor", data_bytes)
    return entries


def _check_entry(path: Any, name: str, fields: Any) -> TensorEntry:
    where = f"tensor {name!r}"
    if not name:
        fail(path, where, "name", "a non-empty string", "an empty one")
    if not isinstance(fields, dict) or sorted(fields) != ["bytes", "crc32", "dtype", "offset", "shape"]:
        fail(path, where, "entry", "the keys dtype, shape, offset, bytes, crc32", repr(fields)[:200])
    dtype, shape, offset, num_bytes, crc32 = (fields[k] for k in ("dtype", "shape", "offset", "bytes", "crc32"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        fail(path, where, "dtype", f"one of {' '.join(DTYPES)}", repr(dtype))
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(_is_count(size) for size in shape):
        fail(path, where, "shape", f"at most {MAX_RANK} non-negative integers", repr(shape))
    itemsize = DTYPES[dtype].itemsize
    if math.prod(max(size, 1) for size in shape) * itemsize >= 1 << 63:
        fail(path, where, "shape", "fewer than 2^63 bytes", shape)
    if not _is_count(offset) or offset % ALIGNMENT:
        fail(path, where, "offset", f"a non-negative multiple of {ALIGNMENT}", repr(offset))
    if not _is_count(num_bytes) or num_bytes != math.prod(shape) * itemsize:
        fail(path, where, "bytes", f"{math.prod(shape) * itemsize} for shape {shape} of {dtype}", repr(num_bytes))
    if not _is_count(crc32) or crc32 >= 1 << 32:
        fail(path, where, "crc32", "an integer below 2^32", repr(crc32))
    return TensorEntry(dtype, tuple(shape), offset, num_bytes, crc32)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63
