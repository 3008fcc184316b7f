"""KDTR files that are good, damaged or hostile, for the tests of both readers."""

from __future__ import annotations

import json
import struct
import zlib

import numpy as np

from kdtree_nb.kdtr import Bf16
from kdtree_nb.kdtr_header import DTYPES


def sample_tensors(seed=0):
    rng = np.random.default_rng(seed)
    tensors = {}
    for dtype, numpy_dtype in DTYPES.items():
        for shape in [(), (3,), (5, 7), (0, 4), (2, 1, 33)]:
            raw = rng.integers(0, 2 if dtype == "bool" else 256, size=(int(np.prod(shape)), numpy_dtype.itemsize))
            array = raw.astype(np.uint8).reshape(-1).view(numpy_dtype).reshape(shape)
            tensors[f"{dtype}.{'x'.join(map(str, shape))}"] = Bf16(array) if dtype == "bf16" else array
    return tensors


def bits(tensor):
    array = np.asarray(tensor.bits if isinstance(tensor, Bf16) else tensor)
    return array.shape, array.dtype, array.tobytes()


def write_raw(path, header, data=b"", header_bytes=None, version=1, magic=b"KDTR\r\n\x1a\n"):
    """A file with any header (bytes, or a value for JSON) and a correct header CRC, as the format documents it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = struct.pack("<Q", len(text) if header_bytes is None else header_bytes)
    raw = magic + struct.pack("<II", version, zlib.crc32(length + text)) + length + text
    path.write_bytes(raw + b"\0" * (-len(raw) % 64) + data)
    return path


def entry(data=b"", **changes):
    fields = {"dtype": "u8", "shape": [len(data)], "offset": 0, "bytes": len(data), "crc32": zlib.crc32(data)}
    return {**fields, **changes}


def with_tensors(**tensors):
    return {"metadata": {}, "tensors": tensors}


DATA = bytes(range(64)) + b"tail"
DEEP = b"[" * 100_000 + b"]" * 100_000
HOSTILE = {
    "duplicate name": (b'{"metadata":{},"tensors":{"x":{},"x":{}}}', b"", "tensor or key 'x': name: .* duplicate"),
    "duplicate field": (b'{"metadata":{},"tensors":{"x":{"dtype":1,"dtype":2}}}', b"", "'dtype': name: .* duplicate"),
    "NaN": (b'{"metadata":{"a":NaN},"tensors":{}}', b"", "finite value, got NaN"),
    "infinity by overflow": (b'{"metadata":{"a":1e999},"tensors":{}}', b"", "finite value, got 1e999"),
    "huge integer": (b'{"metadata":{"a":' + b"9" * 10000 + b'},"tensors":{}}', b"", "header: expected JSON"),
    "deep metadata": (b'{"metadata":{"a":' + DEEP + b'},"tensors":{}}', b"", "header: expected JSON.*RecursionError"),
    "65 levels": (b'{"metadata":{"a":' + b"[" * 63 + b"]" * 63 + b'},"tensors":{}}', b"", "nesting: .* at most 64"),
    "not UTF-8": (b'{"metadata":{"\xff":1},"tensors":{}}', b"", "header: expected JSON in UTF-8"),
    "not JSON": (b"{", b"", "header: expected JSON"),
    "no object": ([], b"", "keys metadata and tensors"),
    "extra key": ({"metadata": {}, "tensors": {}, "x": 1}, b"", "keys metadata and tensors"),
    "tensors is a list": ({"metadata": {}, "tensors": []}, b"", "tensors: expected a JSON object, got list"),
    "metadata is null": ({"metadata": None, "tensors": {}}, b"", "metadata: expected a JSON object, got NoneType"),
    "trailing bytes": (with_tensors(), b"x", "data section: expected 0 bytes.*got 1"),
    "empty name": (with_tensors(**{"": entry()}), b"", "non-empty string"),
    "entry is a number": (with_tensors(x=7), b"", "tensor 'x': entry"),
    "missing field": (with_tensors(x={"dtype": "u8"}), b"", "tensor 'x': entry"),
    "unknown field": (with_tensors(x=entry(DATA, note=1)), DATA, "tensor 'x': entry"),
    "unknown dtype": (with_tensors(x=entry(DATA, dtype="f8")), DATA, "tensor 'x': dtype: expected one of f64"),
    "dtype is a list": (with_tensors(x=entry(DATA, dtype=["u8"])), DATA, "tensor 'x': dtype"),
    "shape is a number": (with_tensors(x=entry(DATA, shape=68)), DATA, "tensor 'x': shape"),
    "negative shape": (with_tensors(x=entry(DATA, shape=[-68])), DATA, "non-negative integers, got \\[-68\\]"),
    "two negative sizes": (with_tensors(x=entry(DATA, shape=[-2, -34])), DATA, "tensor 'x': shape"),
    "float shape": (with_tensors(x=entry(DATA, shape=[68.0])), DATA, "tensor 'x': shape"),
    "bool shape": (with_tensors(x=entry(b"a", shape=[True])), b"a", "tensor 'x': shape"),
    "rank 9": (with_tensors(x=entry(b"a", shape=[1] * 9)), b"a", "tensor 'x': shape: expected at most 8"),
    "huge size": (with_tensors(x=entry(DATA, shape=[2**63])), DATA, "tensor 'x': shape"),
    "overflow to 0": (with_tensors(x=entry(shape=[2**32, 2**32])), b"", "fewer than 2\\^63 bytes"),
    "overflow beside 0": (with_tensors(x=entry(shape=[0, 2**62, 2**62])), b"", "fewer than 2\\^63 bytes"),
    "huge tensor": (with_tensors(x=entry(shape=[2**60], bytes=2**60)), b"", "end: expected at most 0 .*truncated"),
    "wrong bytes": (with_tensors(x=entry(DATA, bytes=67)), DATA, "bytes: expected 68 for shape \\[68\\] of u8, got 67"),
    "float bytes": (with_tensors(x=entry(DATA, bytes=68.0)), DATA, "tensor 'x': bytes"),
    "negative offset": (with_tensors(x=entry(DATA, offset=-64)), DATA, "tensor 'x': offset"),
    "float offset": (with_tensors(x=entry(DATA, offset=0.0)), DATA, "tensor 'x': offset"),
    "crooked offset": (with_tensors(x=entry(DATA, offset=4)), DATA, "non-negative multiple of 64, got 4"),
    "offset past the end": (with_tensors(x=entry(DATA, offset=2**40)), DATA, "tensor 'x': offset: expected 0"),
    "large CRC": (with_tensors(x=entry(DATA, crc32=2**32)), DATA, "tensor 'x': crc32"),
    "overlap": (with_tensors(x=entry(DATA), y=entry(DATA[:4])), DATA, "'x': offset: expected no overlap with 'y'"),
    "gap": (with_tensors(x=entry(DATA), y=entry(b"", offset=64)), DATA + bytes(3), "data section: expected 68 bytes"),
    "gap between": (with_tensors(x=entry(DATA), y=entry(b"a", offset=192)), bytes(193), "'y': offset: expected 128"),
    "truncated data": (with_tensors(x=entry(DATA)), DATA[:-1], "'x': end: expected at most 67 .*truncated.*got 68"),
}
"""name: (header, data, what the message of the Python reader matches)."""
