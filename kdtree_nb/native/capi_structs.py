"""The parameter structs of kernels/op_args.h as ctypes classes, read from the header itself: they cannot drift."""

from __future__ import annotations

import ctypes
import dataclasses
import re

from kdtree_nb.errors import KernelBuildError

_NUMBERS = {"int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32, "float": ctypes.c_float, "bool": ctypes.c_bool,
            "Dtype": ctypes.c_int32, "Scoring": ctypes.c_int32}  # fmt: skip
_POINTEES = {"void": "float", "float": "f32", "double": "f64", "int64_t": "i64", "int32_t": "i32", "uint8_t": "u8",
             "uint16_t": "bf16"}  # fmt: skip
_STRUCT = re.compile(r"^struct (\w+) \{(.*?)^\};", re.MULTILINE | re.DOTALL)
_KERNEL = re.compile(r"^int (\w+)_(?:cpu|cuda)\(const (\w+)&", re.MULTILINE)
_FIELD = re.compile(r"(const )?(\w+)(\*?) ([\w, ]+)")


@dataclasses.dataclass(frozen=True)
class Pointer:
    """A pointer field. kind: of its elements, f32 f64 bf16 i32 i64 u8, or float: F32 or BF16 by the struct's dtype."""

    kind: str
    is_output: bool


@dataclasses.dataclass(frozen=True)
class Op:
    """An operation: the ctypes class of its struct, its pointers by name, and the names of its other fields."""

    name: str
    struct: type[ctypes.Structure]
    pointers: dict[str, Pointer]
    numbers: tuple[str, ...]


def read_ops(header: str) -> dict[str, Op]:
    """The operations that the text of op_args.h declares, by name, in its order. Raises KernelBuildError on a field
    of a form that this reader does not know."""
    structs = {name: _fields(name, body) for name, body in _STRUCT.findall(header)}
    ops = {}
    for op, name in dict(_KERNEL.findall(header)).items():
        if name not in structs:
            raise KernelBuildError(f"op_args.h: {op}: expected a struct {name}, got none. Reinstall kdtree_nb.")
        fields = structs[name]
        pointers = {field: kind for field, (_, kind) in fields.items() if kind}
        struct = type(name, (ctypes.Structure,), {"_fields_": [(field, of[0]) for field, of in fields.items()]})
        ops[op] = Op(op, struct, pointers, tuple(field for field in fields if field not in pointers))
    return ops


def _fields(struct: str, body: str) -> dict[str, tuple[type, Pointer | None]]:
    fields: dict[str, tuple[type, Pointer | None]] = {}
    for statement in re.sub(r"//[^\n]*", "", body).split(";"):
        if not statement.strip():
            continue
        found = _FIELD.fullmatch(statement.strip())
        known = found and (found[2] in _POINTEES if found[3] else found[2] in _NUMBERS)
        if not known:
            raise KernelBuildError(f"op_args.h: {struct}: expected a field of a known type, got {statement.strip()!r}")
        for name in found[4].split(","):
            pointer = Pointer(_POINTEES[found[2]], not found[1]) if found[3] else None
            fields[name.strip()] = (ctypes.c_void_p if pointer else _NUMBERS[found[2]], pointer)
    return fields
