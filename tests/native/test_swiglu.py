"""swiglu and residual_add against float64; the kernels' own exp over its whole range."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kdtree_nb import reference
from kdtree_nb.native import ops

pytestmark = pytest.mark.usefixtures("on_device")

SHAPES = [(0, 4), (1, 1), (17, 15), (2, 16), (3, 17), (65, 96), (4, 331)]


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_reference(shape, normal, exactly, assert_close, rounding):
    gate_up = normal(shape[0], 2 * shape[1], scale=3.0)
    want = reference.swiglu(exactly(gate_up), rounding)
    assert_close(ops.swiglu(gate_up), want, np.abs(want))


def test_exp_is_accurate_over_its_whole_range(exactly):
    gate = torch.linspace(-120, 120, 100_001)
    got = exactly(ops.swiglu(torch.cat([gate, torch.ones_like(gate)])[None])[0])
    x = exactly(gate)
    with np.errstate(over="ignore"):
        want = x / (1 + np.exp(-x))
    overflows = x < -88.7  # e^-x does not fit into FP32, and the true value is nearly 0
    assert np.all(np.abs(got - want)[~overflows] <= 4 * 2.0**-24 * np.abs(want)[~overflows])
    assert np.all(np.abs(got[overflows]) <= 1e-36) and got[0] == 0


def test_extremes(dtype):
    gate = torch.tensor([0.0, -1e30, 1e30, float("inf"), float("nan")], dtype=dtype)
    out = ops.swiglu(torch.cat([gate, torch.ones(5, dtype=dtype)])[None])[0]
    assert out[:2].eq(0).all() and out[2] == gate[2] and out[3] == float("inf") and out[4].isnan()


def test_an_element_has_the_same_bits_in_any_lane(normal, assert_same_bits):
    gate, up = normal(40), normal(40)
    whole = ops.swiglu(torch.cat([gate, up])[None])[0]
    single = torch.cat([ops.swiglu(torch.stack([g, u])[None])[0] for g, u in zip(gate, up, strict=True)])
    assert_same_bits(whole, single)


def test_a_row_has_the_same_bits_among_any_rows_and_threads(normal, assert_same_bits, num_threads):
    gate_up = normal(300, 190)
    with num_threads(1):
        alone = torch.cat([ops.swiglu(row[None]) for row in gate_up])
    with num_threads(2):
        for count in (2, 17, 300):
            assert_same_bits(ops.swiglu(gate_up[:count]), alone[:count])


@pytest.mark.parametrize("shape", SHAPES)
def test_residual_add_rounds_the_sum_once(shape, normal, assert_same_bits):
    x, y = normal(*shape), normal(*shape, scale=100.0)
    assert_same_bits(ops.residual_add(x, y), (x.double() + y.double()).float().to(x.dtype))


def test_residual_add_on_two_threads(normal, assert_same_bits, num_threads):
    x, y = normal(300, 512), normal(300, 512)
    with num_threads(1):
        one = ops.residual_add(x, y)
    with num_threads(2):
        assert_same_bits(ops.residual_add(x, y), one)


def test_bf16_rounds_to_nearest_even_and_keeps_infinities():
    half_place = 2.0**-8
    x = torch.tensor([[1.0, 1.0 + 2 * half_place, 3.3e38, -3.3e38, float("inf"), float("nan")]]).bfloat16()
    y = torch.tensor([[half_place, half_place, 3.3e38, -3.3e38, 1.0, 1.0]]).bfloat16()
    want = torch.tensor([1.0, 1.0 + 4 * half_place, float("inf"), -float("inf"), float("inf")])
    got = ops.residual_add(x, y)[0].float()
    assert got[:5].equal(want) and got[5].isnan()


def test_opcheck(normal, opcheck):
    opcheck("swiglu", normal(3, 10))
    opcheck("residual_add", normal(3, 10), normal(3, 10))


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="swiglu: gate_up: expected an even last dimension"):
        ops.swiglu(torch.zeros(3, 7))
    with pytest.raises(ValueError, match="swiglu: gate_up: expected a contiguous tensor"):
        ops.swiglu(torch.zeros(8, 3).T)
    with pytest.raises(ValueError, match=r"residual_add: y: expected shape .*3, 7.*got .*7, 3"):
        ops.residual_add(torch.zeros(3, 7), torch.zeros(7, 3))
    with pytest.raises(ValueError, match="residual_add: y: expected dtype Float, got BFloat16"):
        ops.residual_add(torch.zeros(3, 7), torch.zeros(3, 7).bfloat16())
