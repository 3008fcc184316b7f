"""The precisions of the reference: float64 (the oracle), float32 and bf16 (float32 arrays holding BF16 values)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Rounding = Callable[[np.ndarray], np.ndarray]
"""A function applied where the rounding table of the design says so: `exact` or `round_bf16`."""


def exact(x: np.ndarray) -> np.ndarray:
    """No rounding: the array itself."""
    return x


def round_bf16(x: np.ndarray) -> np.ndarray:
    """Nearest BF16 value, ties to even, of every element of a float32 array; float32, same shape. NaN stays NaN.

    A float32 is a BF16 (its upper 16 bits) followed by 16 bits that are dropped. Adding just under half of the last
    kept bit, plus that bit itself, carries into it exactly when the dropped part is above half, or is half and the kept
    part is odd. float64 input is rounded to float32 first.
    """
    x = np.asarray(x, dtype=np.float32)
    bits = x.view(np.uint32)
    last_kept_bit = (bits >> 16) & 1
    rounded = (bits + (0x7FFF + last_kept_bit)) & 0xFFFF0000
    return np.where(np.isnan(x), x, rounded.view(np.float32))


class Precision(NamedTuple):
    """How a `ReferenceModel` computes: the dtype of its arrays and the rounding between its steps."""

    name: str
    dtype: type
    rounding: Rounding

    @classmethod
    def named(cls, name: str) -> Precision:
        """'float64', 'float32' or 'bf16'. Raises ValueError for any other name."""
        if name not in _ROUNDING:
            raise ValueError(f"precision: expected one of {sorted(_ROUNDING)}, got {name!r}")
        return cls(name, np.float64 if name == "float64" else np.float32, _ROUNDING[name])


_ROUNDING: dict[str, Rounding] = {"float64": exact, "float32": exact, "bf16": round_bf16}
