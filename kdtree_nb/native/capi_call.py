"""One call through the C ABI: from keyword arguments to a filled struct, and to what the caller gets."""

from __future__ import annotations

import functools
from collections import namedtuple
from typing import Any

import numpy as np

from kdtree_nb.kdtr import Bf16
from kdtree_nb.native.capi_signatures import SIGNATURES, Array, packed_shape, value_of
from kdtree_nb.native.capi_structs import Op

DTYPES = {"f32": 0, "bf16": 1}
SCORINGS = {"softmax": 0, "sigmoid": 1}

_NUMPY = {"f32": np.dtype(np.float32), "f64": np.dtype(np.float64), "i64": np.dtype(np.int64),
          "i32": np.dtype(np.int32), "u8": np.dtype(np.uint8), "bf16": np.dtype(np.uint16)}  # fmt: skip
_DEFAULTS = {"num_threads": 1, "weights_settled": False, "ids_per_row": 1, "first_segment": 0, "num_segments": 0,
             "whole_in": 0, "whole_width": 0, "whole_shared_width": 0, "whole_vocab": 0}  # fmt: skip
_OPTIONAL_SIZES = ("shared_width", "num_ids", "num_groups", "topk_groups")


class Call:
    """The arguments of one call: a struct with its numbers set, and the input arrays' bits by name."""

    def __init__(self, op: Op, is_cpu: bool, arguments: dict[str, Any]) -> None:
        self.op, self.is_cpu, self.arguments = op, is_cpu, arguments
        self.symbols: dict[str, int] = {}
        self.values: dict[str, np.ndarray] = {}
        self.dtype = ""
        self.args = op.struct()
        signature = SIGNATURES[op.name]
        for array in signature.inputs:
            self._take(array)
        for field, symbol in signature.sizes.items():
            if symbol.isalpha() and (symbol not in self.symbols or field in arguments):
                self._bind(field, symbol)
        for array in signature.inputs:
            self._check_shape(array)
        for field, expression in signature.sizes.items():
            self._set(field, self._value(expression))
        for field in op.numbers:
            if field not in signature.sizes and field != "workspace_bytes":
                self._set(field, self._number(field))
        if self.arguments:
            raise ValueError(f"{op.name}: expected no further arguments, got {sorted(self.arguments)}")

    def _take(self, array: Array) -> None:
        """Check the type of an input, keep its bits and bind the symbols that are its dimensions."""
        value = self.arguments.pop(array.name, None)
        if value is None:
            if not array.is_optional:
                raise ValueError(f"{self.op.name}: {array.name}: expected an array, got none")
            return
        kind = self.op.pointers[array.name].kind
        found = _kind_of(value)
        wanted = (self.dtype or "f32 or bf16") if kind == "float" else kind
        if found is None or found not in wanted.split(" or "):
            got = getattr(value, "dtype", type(value).__name__) if found is None else found
            raise ValueError(f"{self.op.name}: {array.name}: expected an array of {wanted}, got {got}")
        self.dtype = found if kind == "float" else self.dtype
        bits = bits_of(value)
        if array.is_in_place and not (bits.flags.c_contiguous and bits.flags.writeable):
            raise ValueError(f"{self.op.name}: {array.name}: expected a contiguous and writable array, got another")
        if bits.ndim != (4 if array.is_packed else len(array.dims)):
            raise ValueError(
                f"{self.op.name}: {array.name}: expected shape [{', '.join(array.dims)}], got {bits.shape}"
            )
        self.values[array.name] = np.ascontiguousarray(bits)
        for dim, size in zip(array.dims, bits.shape, strict=False):
            if not array.is_packed and dim.isalpha():
                self.symbols.setdefault(dim, size)
            elif not array.is_packed and dim.startswith("2*"):
                self.symbols.setdefault(dim[2:], size // 2)

    def _check_shape(self, array: Array) -> None:
        if array.name in self.values and self.values[array.name].shape != self._shape(array):
            raise ValueError(
                f"{self.op.name}: {array.name}: expected shape [{', '.join(array.dims)}] = {self._shape(array)}, "
                f"got {self.values[array.name].shape}"
            )

    def _shape(self, array: Array) -> tuple[int, ...]:
        dims = [self._value(dim) for dim in array.dims]
        return packed_shape(dims, self.is_cpu) if array.is_packed else tuple(dims)

    def _value(self, expression: str) -> int:
        return value_of(expression, self.symbols)

    def _bind(self, field: str, symbol: str) -> None:
        """Take a size from the arguments; where an array shows it, too, both must agree. Those of
        _OPTIONAL_SIZES may be left out."""
        known = self.symbols.get(symbol)
        value = self.arguments.pop(field, 0 if field in _OPTIONAL_SIZES else None)
        if not isinstance(value, int | np.integer) or not 0 <= value <= 1 << 40 or known not in (None, value):
            wanted = "an integer from 0 to 2^40" if known is None else f"{known}, the size of an array"
            raise ValueError(f"{self.op.name}: {field}: expected {wanted}, got {value!r}")
        self.symbols[symbol] = int(value)

    def _set(self, field: str, value: Any) -> None:
        """Set a number of the struct; ctypes would cut one that is too large down to the field's bits."""
        try:
            setattr(self.args, field, value)
            held = getattr(self.args, field)
        except (TypeError, OverflowError):
            held = None
        if held is None or not isinstance(held, float) and held != value:
            raise ValueError(f"{self.op.name}: {field}: expected a number that its C type holds, got {value!r:.40}")

    def _number(self, field: str) -> Any:
        """A scalar field: from the arguments, else dtype from the arrays, else a default, else an error."""
        if field == "dtype":
            return DTYPES[self.dtype]
        if field == "int4":  # the weights are floats
            return False
        value = self.arguments.pop(field, self.dtype if field == "out_dtype" else _DEFAULTS.get(field))
        names = {"out_dtype": DTYPES, "scoring": SCORINGS}.get(field)
        if value is None or (names is not None and value not in names):
            raise ValueError(f"{self.op.name}: {field}: expected {' or '.join(names or ['a number'])}, got {value!r}")
        return names[value] if names else value

    def new(self, array: Array) -> np.ndarray | Bf16:
        """A new array for a result."""
        kind = self.op.pointers[array.name].kind
        if kind == "float":
            number = getattr(self.args, "out_dtype", self.args.dtype)
            kind = next(name for name in DTYPES if DTYPES[name] == number)
        zeros = np.zeros(self._shape(array), _NUMPY[kind])
        return Bf16(zeros) if kind == "bf16" else zeros

    def result(self, arrays: dict[str, np.ndarray | Bf16]) -> Any:
        """What a caller gets: None, an array, or a named tuple of several. Of tree_rows the rows in use alone."""
        if self.op.name == "tree_rows":
            num_rows = int(self.values["num_nodes"].sum())
            arrays = {name: array[:num_rows] for name, array in arrays.items()}
        if len(arrays) < 2:
            return next(iter(arrays.values()), None)
        return _tuple_of(self.op.name, tuple(arrays))(**arrays)


@functools.cache
def _tuple_of(op: str, fields: tuple[str, ...]) -> type:
    return namedtuple("".join(word.capitalize() for word in op.split("_")), fields)


def _kind_of(value: Any) -> str | None:
    if isinstance(value, Bf16):
        return "bf16"
    kinds = {dtype: kind for kind, dtype in _NUMPY.items() if kind != "bf16"}
    return kinds.get(value.dtype) if isinstance(value, np.ndarray) else None


def bits_of(value: np.ndarray | Bf16) -> np.ndarray:
    """The array itself, or the bits of a bfloat16 one."""
    return value.bits if isinstance(value, Bf16) else value
