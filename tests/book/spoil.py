"""Change one element of a result: the smallest fault that an exactness claim must notice."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import torch

REFERENCE_STEP = 1e-3
"""By how much (relative to max(1, |x|)) a float of a numpy reference is moved."""


def output_names(result: Any) -> list[str]:
    """Names of the separate outputs of a result: fields, tuple positions, or [""] for a single value."""
    if dataclasses.is_dataclass(result):
        return [f.name for f in dataclasses.fields(result) if _spoilable(getattr(result, f.name))]
    if isinstance(result, tuple):
        names = getattr(result, "_fields", [str(i) for i in range(len(result))])
        return [name for name, value in zip(names, result, strict=True) if _spoilable(value)]
    return [""] if _spoilable(result) else []


def spoil_output(result: Any, name: str, last: bool) -> Any:
    """A copy of `result` with one element of output `name` changed. last: the last element where that is meaningful."""
    if name == "":
        return spoil_value(result, last)
    if dataclasses.is_dataclass(result):
        spoiled = copy.copy(result)
        object.__setattr__(spoiled, name, _spoil_field(result, name, last))
        return spoiled
    fields = list(getattr(result, "_fields", [str(i) for i in range(len(result))]))
    values = list(result)
    values[fields.index(name)] = _spoil_field(result, name, last)
    return type(result)(*values) if hasattr(result, "_fields") else tuple(values)


def spoil_generation(result: Any, name: str, last: bool) -> Any:
    """A copy of a Generation, or list of them, with one token, or the lowest bit of one logit, changed."""
    if isinstance(result, list):
        place = len(result) - 1 if last else 0
        return [spoil_generation(g, name, last) if i == place else g for i, g in enumerate(result)]
    value = getattr(result, name)
    if value is None or len(value) == 0:
        raise ValueError(f"{name}: nothing to spoil; for logits the cell must ask with return_logits=True")
    spoiled = copy.copy(result)
    if name == "tokens":
        value = list(value)
        value[-1 if last else 0] ^= 1
    else:
        value = spoil_value(value, last)
    object.__setattr__(spoiled, name, value)
    return spoiled


def spoil_value(value: Any, last: bool) -> Any:
    """A copy of an array, list or number with its first element changed (last: the last one, if it holds floats)."""
    if isinstance(value, torch.Tensor):
        return _spoil_tensor(value, -1 if last and value.is_floating_point() else 0)
    if isinstance(value, np.ndarray):
        spoiled = value.copy()
        place = -1 if last and value.dtype.kind == "f" else 0
        spoiled.flat[place] = _moved(value.flat[place])
        return spoiled
    if isinstance(value, list | tuple):
        return type(value)([spoil_value(value[0], last), *value[1:]])
    return _moved(value)


def spoil_in_place(now: torch.Tensor, before: torch.Tensor) -> None:
    """Change, in place, one of the elements in which `now` differs from `before`. ValueError if there is none."""
    changed = (now != before).reshape(-1).nonzero()
    if len(changed) == 0:
        raise ValueError("the in-place operation changed nothing that could be spoiled")
    now.copy_(_spoil_tensor(now, int(changed[-1])))


def _spoilable(value: Any) -> bool:
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.size != 0 if isinstance(value, np.ndarray) else value.numel() > 0
    if isinstance(value, list | tuple):
        return len(value) > 0 and _spoilable(value[0])
    return isinstance(value, int | float | np.generic) and not isinstance(value, bool)


def _spoil_field(result: Any, name: str, last: bool) -> Any:
    value = getattr(result, name) if hasattr(result, name) else result[int(name)]
    num_nodes = getattr(result, "num_nodes", None)
    if num_nodes is not None and name != "num_nodes":  # a tree: slots behind num_nodes are never read
        return _spoil_row(value, min(1, int(num_nodes.reshape(-1)[0]) - 1))
    return spoil_value(value, last)


def _spoil_row(value: Any, node: int) -> Any:
    spoiled = value.clone() if isinstance(value, torch.Tensor) else value.copy()
    row = spoiled[0] if spoiled.ndim > 1 else spoiled
    row[node : node + 1] = spoil_value(row[node : node + 1], last=False)
    return spoiled


def _spoil_tensor(value: torch.Tensor, place: int) -> torch.Tensor:
    spoiled = value.clone().contiguous()
    flat = spoiled.view(-1)
    if value.is_floating_point():
        flat = flat.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()])
        flat[place] ^= 1
    elif value.dtype == torch.bool:
        flat[place] = not flat[place]
    else:
        flat[place] += 1
    return spoiled


def _moved(value: Any) -> Any:
    if isinstance(value, bool | np.bool_):
        return not value
    return value + REFERENCE_STEP * max(1.0, abs(value)) if isinstance(value, float | np.floating) else value + 1
