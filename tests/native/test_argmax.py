"""argmax: lowest id of the largest logit; -1 for NaN."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kdtree_nb import reference
from kdtree_nb.native import ops

pytestmark = pytest.mark.usefixtures("on_device")


@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (17, 15), (3, 16), (5, 17), (65, 331), (65, 4096)])
def test_equals_the_reference(shape, rng, num_threads):
    logits = rng.standard_normal(shape).astype(np.float32)
    for threads in (1, 2):
        with num_threads(threads):
            assert np.array_equal(ops.argmax(torch.from_numpy(logits)).numpy(), reference.argmax(logits))


def test_ties_go_to_the_lower_id(rng):
    logits = rng.integers(0, 3, (200, 70)).astype(np.float32)
    assert np.array_equal(ops.argmax(torch.from_numpy(logits)).numpy(), reference.argmax(logits))


def test_maximum_at_every_place():
    assert ops.argmax(torch.eye(37)).equal(torch.arange(37))


def test_a_row_with_nan_is_minus_one():
    logits = torch.zeros(38, 37)
    logits.diagonal()[:] = float("nan")
    assert ops.argmax(logits).tolist() == [-1] * 37 + [0]


def test_infinities_and_signed_zero():
    inf = float("inf")
    rows = torch.tensor([[-inf, -inf, -inf], [-inf, -1.0, -inf], [0.0, inf, inf], [-0.0, 0.0, -1.0]])
    assert ops.argmax(rows).tolist() == [0, 1, 1, 0]


def test_opcheck(opcheck):
    opcheck("argmax", torch.randn(3, 20))


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (torch.zeros(3, 0), "argmax: vocabulary size V: expected at least 1, got 0"),
        (torch.zeros(3), r"argmax: logits: expected shape \[T, V\]"),
        (torch.zeros(3, 4).bfloat16(), "argmax: logits: expected dtype Float, got BFloat16"),
    ],
)
def test_bad_input_is_named(logits, message):
    with pytest.raises(ValueError, match=message):
        ops.argmax(logits)
