"""The structs of kernels/op_args.h for ctypes, and the operations that exist on CUDA: read from the header itself, so
that they cannot drift. Knows no torch."""

from __future__ import annotations

import ctypes
import functools
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEADER = ROOT / "kernels/op_args.h"
C_TYPES = {
    "int64_t": ctypes.c_int64,
    "int32_t": ctypes.c_int32,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "uint64_t": ctypes.c_uint64,
    "bool": ctypes.c_bool,
    "Dtype": ctypes.c_int32,
    "Scoring": ctypes.c_int32,
}


def args_name(op: str) -> str:
    """The struct of an operation: rms_norm -> RmsNormArgs."""
    return "".join(word.capitalize() for word in op.split("_")) + "Args"


def cuda_ops() -> list[str]:
    """The operations that op_args.h declares for CUDA, in its order."""
    return re.findall(r"^int (\w+)_cuda\(const \w+&, void\* stream\);", HEADER.read_text(), re.M)


def workspace_ops() -> list[str]:
    """Those of them that say how much workspace they need."""
    return re.findall(r"^int64_t (\w+)_cuda_workspace_bytes\(", HEADER.read_text(), re.M)


@functools.cache
def args_type(op: str) -> type[ctypes.Structure]:
    """The ctypes mirror of an operation's struct. Raises ValueError where the header cannot be read."""
    text = HEADER.read_text()
    body = re.search(rf"struct {args_name(op)} {{(.*?)\n}};", text, re.S)
    if body is None:
        raise ValueError(f"op_args.h: expected a struct {args_name(op)}, got none: add it or correct the name")
    fields = []
    for statement in re.sub(r"//[^\n]*", "", body[1]).split(";"):
        declaration = re.fullmatch(r"\s*(?:const )?(\w+)(\*?) ([\w, ]+)", statement)
        if declaration:
            c_type = ctypes.c_void_p if declaration[2] else C_TYPES[declaration[1]]
            fields += [(name.strip(), c_type) for name in declaration[3].split(",")]
        elif statement.strip():
            raise ValueError(f"op_args.h: {args_name(op)}: expected `type name, …`, got {statement.strip()!r}")
    return type(args_name(op), (ctypes.Structure,), {"_fields_": fields})
