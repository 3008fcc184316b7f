"""Weights: the tensors of a checkpoint, taken by name, checked by shape and converted to a precision."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kdtree_nb.errors import CheckpointError
from kdtree_nb.reference.precision import Precision


class Weights:
    """A view of the tensors whose names begin with `prefix`. Remembers which were taken."""

    def __init__(self, tensors: Mapping[str, np.ndarray], precision: Precision) -> None:
        """tensors: name -> float array. The names are those of DeepSeek checkpoints."""
        self.tensors, self.precision, self.prefix = tensors, precision, ""
        self.taken: set[str] = set()

    def at(self, prefix: str) -> Weights:
        """The view of the tensors below `prefix`, which ends with a dot."""
        below = Weights(self.tensors, self.precision)
        below.prefix, below.taken = self.prefix + prefix, self.taken
        return below

    def take(self, name: str, *shape: int) -> np.ndarray:
        """The tensor `prefix + name + '.weight'` in the precision. Raises CheckpointError if missing or misshapen."""
        tensor = self._find(f"{name}.weight", shape)
        return self.precision.rounding(tensor.astype(self.precision.dtype))

    def take_bias(self, name: str, *shape: int) -> np.ndarray:
        """The tensor `prefix + name`, which is never rounded."""
        return self._find(name, shape).astype(self.precision.dtype)

    def _find(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        name = self.prefix + name
        if name not in self.tensors:
            raise CheckpointError(f"weights: expected a tensor {name} {list(shape)}, got none of that name")
        tensor = self.tensors[name]
        if tensor.shape != shape:
            raise CheckpointError(f"weights: {name}: expected {list(shape)}, got {list(tensor.shape)}")
        self.taken.add(name)
        return tensor

    def check_all_taken(self) -> None:
        """Raise CheckpointError if a tensor was never taken: the model would silently leave it out."""
        left = sorted(set(self.tensors) - self.taken)
        if left:
            raise CheckpointError(f"weights: expected no tensors besides the configuration's, got {left[:3]}")
