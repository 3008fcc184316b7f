"""embed copies rows of a table."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kdtree_nb import reference
from kdtree_nb.native import ops

pytestmark = pytest.mark.usefixtures("on_device")
BY_VALUE = pytest.mark.cpu_only("a GPU does not look at values: tests/cuda/test_bad_values.py")


@pytest.mark.parametrize("shape", [(0, 5, 3), (1, 1, 1), (17, 331, 192), (65, 256, 33)])
def test_equals_the_reference(shape, normal, rng, exactly, assert_same_bits):
    T, V, D = shape
    weight, token = normal(V, D), torch.from_numpy(rng.integers(0, V, T))
    got = ops.embed(weight, token)
    assert np.array_equal(exactly(got), reference.embed(exactly(weight), token.numpy()))
    assert_same_bits(got, weight[token])


def test_first_and_last_id(normal):
    weight = normal(7, 4)
    assert ops.embed(weight, torch.tensor([6, 0, 6])).equal(weight[[6, 0, 6]])


def test_opcheck(normal, opcheck):
    opcheck("embed", normal(7, 4), torch.tensor([6, 0]))


@pytest.mark.parametrize(
    ("token", "message"),
    [
        pytest.param(torch.tensor([0, 7]), "embed: token: expected 0 … 6, got 7 at index 1", marks=BY_VALUE),
        pytest.param(torch.tensor([-1]), "embed: token: expected 0 … 6, got -1 at index 0", marks=BY_VALUE),
        (torch.tensor([1], dtype=torch.int32), "embed: token: expected dtype Long, got Int"),
        (torch.tensor([[1]]), r"embed: token: expected shape \[T\]"),
    ],
)
def test_bad_input_is_named(token, message, normal):
    with pytest.raises(ValueError, match=message):
        ops.embed(normal(7, 4), token)
