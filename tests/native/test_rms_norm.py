"""rms_norm against float64 and against itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kdtree_nb import reference
from kdtree_nb.native import ops

pytestmark = pytest.mark.usefixtures("on_device")


@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (17, 15), (2, 16), (3, 17), (5, 48), (65, 192), (4, 257), (2, 7168)])
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_equals_the_reference(shape, eps, normal, exactly, assert_close, rounding):
    x, weight = normal(*shape), normal(shape[1])
    want = reference.rms_norm(exactly(x), exactly(weight), eps, rounding)
    assert_close(ops.rms_norm(x, weight, eps), want, np.abs(want))


@pytest.mark.cpu_only("the order of the CPU")
def test_sums_squares_in_16_lanes(normal, fma32):
    x = normal(4, 70)
    X = np.zeros((4, 80), np.float32)
    X[:, :70] = x.float().numpy()
    lanes = np.zeros((4, 16), np.float32)
    for block in range(0, 80, 16):
        lanes = fma32(X[:, block : block + 16], X[:, block : block + 16], lanes)
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    scale = np.float32(1) / np.sqrt(lanes / np.float32(70) + np.float32(1e-6))
    want = torch.from_numpy(X[:, :70] * scale * np.float32(1.5)).to(x.dtype)
    assert ops.rms_norm(x, torch.full((70,), 1.5, dtype=x.dtype), 1e-6).equal(want)


def test_a_row_has_the_same_bits_among_any_rows_and_threads(normal, assert_same_bits, num_threads):
    x, weight = normal(1000, 192), normal(192)
    with num_threads(1):
        alone = torch.cat([ops.rms_norm(x[t : t + 1], weight, 1e-6) for t in range(1000)])
    for threads in (1, 2):
        with num_threads(threads):
            for count in (2, 17, 65, 1000):
                assert_same_bits(ops.rms_norm(x[:count], weight, 1e-6), alone[:count])


def test_strided_rows_are_read_in_place(normal, assert_same_bits):
    wide, weight = normal(7, 100), normal(48)
    view = wide[:, 30:78]
    assert_same_bits(ops.rms_norm(view, weight, 1e-6), ops.rms_norm(view.contiguous(), weight, 1e-6))


def test_zeros_stay_zero_and_nan_stays_in_its_row(normal):
    x, weight = normal(3, 20), normal(20)
    x[0], x[1, 4] = 0, float("nan")
    out = ops.rms_norm(x, weight, 1e-6)
    assert out[0].eq(0).all() and out[1].isnan().all() and out[2].isfinite().all()


def test_opcheck(normal, opcheck):
    opcheck("rms_norm", normal(3, 20), normal(20), 1e-6)


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (torch.zeros(3, 20), torch.zeros(21), r"rms_norm: weight: expected shape .*20.*got .*21"),
        (torch.zeros(3, 20), torch.zeros(20).bfloat16(), r"rms_norm: weight: expected dtype Float, got BFloat16"),
        (torch.zeros(20), torch.zeros(20), r"rms_norm: x: expected 2 dimensions"),
        (torch.zeros(20, 3).T, torch.zeros(20), r"rms_norm: x: expected stride 1"),
        (torch.zeros(3, 20).half(), torch.zeros(20).half(), r"rms_norm: x: expected dtype Float or BFloat16, got Half"),
    ],
)
def test_bad_input_is_named(x, weight, message):
    with pytest.raises(ValueError, match=message):
        ops.rms_norm(x, weight, 1e-6)
