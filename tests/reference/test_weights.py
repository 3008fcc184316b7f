"""Weights: names, shapes, precision, left-over tensors."""

from __future__ import annotations

import numpy as np
import pytest

from kdtree_nb.errors import CheckpointError
from kdtree_nb.reference import Precision, Weights

TENSORS = {"a.x.weight": np.float32([[1.00390625, 2]]), "a.b.y.weight": np.float32([3])}


def test_take():
    weights = Weights(TENSORS, Precision.named("float64"))
    x = weights.at("a.").take("x", 1, 2)
    assert x.dtype == np.float64 and x.tolist() == [[1.00390625, 2]]
    with pytest.raises(CheckpointError, match="expected no tensors besides the configuration's, got .*a.b.y.weight"):
        weights.check_all_taken()
    weights.at("a.").at("b.").take("y", 1)
    weights.check_all_taken()


def test_bf16_rounds():
    assert Weights(TENSORS, Precision.named("bf16")).at("a.").take("x", 1, 2).tolist() == [[1.0, 2]]


def test_missing_and_misshapen():
    weights = Weights(TENSORS, Precision.named("float32"))
    with pytest.raises(CheckpointError, match=r"expected a tensor b.weight \[2, 3\], got none"):
        weights.take("b", 2, 3)
    with pytest.raises(CheckpointError, match=r"a.x.weight: expected \[2, 1\], got \[1, 2\]"):
        weights.take("a.x", 2, 1)
