"""What can be wrong with an argument of an operator: one change each, the same for the same seed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

TYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool,
    torch.complex64,
)  # fmt: skip
NUMBERS = (-1, 0, 1, 2**31 - 1, 2**31, 2**40, 2**62, -(2**31), -(2**63), 2**63 - 1)
FLOATS = (math.nan, math.inf, -math.inf, 3e38, -3e38, 1e-40, -0.0)
INTS = (-1, 0, 1, 1023, 2**31 - 1, -(2**31))
LONGS = (-1, 2**31, 2**62, 2**63 - 1, -(2**63))

SEED, NUM_RANDOM = 71, 12
"""Random changes of single elements, per tensor."""


@dataclasses.dataclass(frozen=True)
class Damage:
    """One change of one argument.

    kind: what was done, in words that are the same for all values of a sort
    row:  the only index of the first dimension that holds a changed element, if it is so
    """

    argument: str
    what: str
    value: Any = None
    detail: str = ""
    row: int | None = None
    has_value: bool = True

    @property
    def kind(self) -> str:
        return f"{self.argument}: {self.what}"

    def __str__(self) -> str:
        return f"{self.kind}{self.detail and f' ({self.detail})'}"


def damages(arguments: dict[str, Any], types: dict[str, str]) -> Iterator[Damage]:
    """All changes of all arguments; types: those of the schema by name."""
    rng = np.random.default_rng(SEED)
    for name, value in arguments.items():
        yield Damage(name, "of another kind", object())
        yield Damage(name, "text", "text")
        if types[name] == "Tensor":
            yield Damage(name, "missing", None)
            yield Damage(name, "a number", 3)
        if isinstance(value, torch.Tensor):
            yield from _of_tensor(name, value, rng)
        elif types[name] == "Optional[Tensor]":
            yield Damage(name, "a number", 3)
            yield Damage(name, "a tensor", torch.zeros(2, 3, dtype=torch.float16))
        else:
            yield from _of_number(name, value, types[name])
    yield Damage(next(iter(arguments)), "left out", has_value=False)


def _of_number(name: str, value: Any, kind: str) -> Iterator[Damage]:
    yield Damage(name, "missing", None)
    yield Damage(name, "a tensor", torch.zeros(3))
    if kind == "int":
        yield Damage(name, "a fraction", 1.5)
        yield Damage(name, "one more", value + 1)
        yield Damage(name, "one less", value - 1)
        for number in NUMBERS:
            if number != value:
                yield Damage(name, "another number", number, str(number))
    elif kind == "float":
        for number in FLOATS:
            yield Damage(name, "another number", number, str(number))


def _of_tensor(name: str, value: torch.Tensor, rng: np.random.Generator) -> Iterator[Damage]:
    yield from _of_type(name, value)
    yield from _of_shape(name, value)
    yield from _of_strides(name, value)
    yield from _of_values(name, value, rng)


def _of_type(name: str, value: torch.Tensor) -> Iterator[Damage]:
    for dtype in TYPES:
        if dtype != value.dtype:
            other = value.view(torch.uint8).bool() if dtype == torch.bool else value.to(dtype)
            yield Damage(name, "of another type", other.resize_(value.shape), str(dtype))


def _of_shape(name: str, value: torch.Tensor) -> Iterator[Damage]:
    for dim, size in enumerate(value.shape):
        more = torch.cat([value, value.narrow(dim, 0, 1)], dim)
        yield Damage(name, f"one more in dimension {dim}", more)
        if size > 1:
            yield Damage(name, f"one less in dimension {dim}", value.narrow(dim, 0, size - 1).contiguous())
        yield Damage(name, f"none in dimension {dim}", value.narrow(dim, 0, 0).contiguous())
    yield Damage(name, "one dimension more", value.unsqueeze(0))
    yield Damage(name, "one dimension more at the end", value.unsqueeze(-1))
    yield Damage(name, "a scalar", value.flatten()[0].clone())
    yield Damage(name, "empty", value.new_empty(0))
    if value.dim() > 1:
        yield Damage(name, "flat", value.flatten())


def _of_strides(name: str, value: torch.Tensor) -> Iterator[Damage]:
    """Views with the same shape; those whose values are the same are told apart from those where all are one."""
    if value.dim() > 1 and min(value.shape[-2:]) > 1:
        yield Damage(name, "the last two dimensions swapped in memory", value.mT.contiguous().mT)
    if value.shape[-1] > 1:
        yield Damage(name, "every other element", torch.stack([value, value], -1)[..., 0])
    if value.dim() > 1 and value.shape[0] > 1:
        yield Damage(name, "rows inside wider ones", torch.cat([value, value], -1)[..., : value.shape[-1]])
    if value.shape[0] > 1:
        yield Damage(name, "one row for all", value[:1].expand(value.shape))


def _of_values(name: str, value: torch.Tensor, rng: np.random.Generator) -> Iterator[Damage]:
    if value.dtype == torch.bool:
        yield Damage(name, "other values", ~value, "all others")
        return
    if value.is_floating_point():
        values = FLOATS
    elif value.dtype == torch.uint8:
        values = (0, 255)
    else:
        values = INTS + LONGS if value.dtype == torch.int64 else INTS
    for new in values:
        yield Damage(name, "other values", torch.full_like(value, new), f"all {new}")
    for _ in range(NUM_RANDOM):
        index, new = tuple(int(rng.integers(size)) for size in value.shape), values[rng.integers(len(values))]
        copy = value.clone()
        copy[index] = new
        yield Damage(name, "another value", copy, f"{new} at {list(index)}", index[0])
