"""What the cases of sanitize_list.py are made of: calls, arrays read or written, an operation in both types."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

F32, BF16 = 0, 1  # Dtype of op_args.h
DTYPES = (F32, BF16)
DTYPE_NAME = {F32: "F32", BF16: "BF16"}
INT, LONG, FLOAT = np.int32, np.int64, np.float32


@dataclass(frozen=True)
class Out:
    """An array that the kernel writes whole; BF16 as 16-bit words."""

    shape: tuple[int, ...]
    dtype: Any
    is_finite: bool = True


@dataclass(frozen=True)
class Case:
    """One call. `fields` of the operation's struct: numpy arrays, Out, numbers; `shape` is a tile shape of linear."""

    op: str
    form: str
    fields: dict[str, Any]
    shape: int | None = None

    @property
    def name(self) -> str:
        """Operation and form."""
        return f"{self.op} {self.form}"


Forms = Callable[[ctypes.CDLL], list[Case]]
rng = np.random.default_rng(3)


def real(*shape: int, dtype: int) -> np.ndarray:
    """Random numbers of a type of the project, BF16 as 16-bit words."""
    values = rng.standard_normal(shape).astype(FLOAT)
    return values if dtype == F32 else (values.view(np.uint32) >> 16).astype(np.uint16)


def out(*shape: int, dtype: int) -> Out:
    """An output of a type of the project."""
    return Out(shape, FLOAT if dtype == F32 else np.uint16)


def count(n: int) -> np.ndarray:
    """A row count on the device."""
    return np.array([n], INT)


def of_dtypes(op: str, fields: Callable[[int], dict[str, Any]]) -> Forms:
    """Both types of one set of fields."""
    return lambda lib: [Case(op, DTYPE_NAME[t], {**fields(t), "dtype": t}) for t in DTYPES]


def of_one(op: str, fields: Callable[[], dict[str, Any]], form: str = "F32") -> Forms:
    """An operation of one type."""
    return lambda lib: [Case(op, form, fields())]


def packed_shape(groups: int, num_out: int, num_in: int) -> tuple[int, ...]:
    """Of the CUDA layout of packed weights."""
    return groups, -(-num_out // 16), -(-num_in // 32), 512


def packed_int4(groups: int, num_out: int, num_in: int) -> np.ndarray:
    """INT4 weights as pack_int4 leaves them: random values, scales of 0.125."""
    packed = rng.integers(0, 256, (groups, -(-num_out // 64), num_in // 32, 4, 288)).astype(np.uint8)
    packed[..., 256::2], packed[..., 257::2] = 0x00, 0x3E
    return packed
