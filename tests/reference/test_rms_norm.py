"""rms_norm against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kdtree_nb.reference import rms_norm, round_bf16


@pytest.mark.parametrize("shape", [(1, 1), (3, 31), (2, 64), (5, 192), (0, 8)])
def test_against_torch(shape):
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=shape), rng.normal(size=shape[-1])
    want = torch.nn.functional.rms_norm(torch.from_numpy(x), shape[-1:], torch.from_numpy(weight), 1e-5).numpy()
    got = rms_norm(x, weight, 1e-5)
    assert got.shape == shape
    assert np.abs(got - want).max(initial=0) <= 1e-13


def test_zero_row_and_rounding():
    assert (rms_norm(np.zeros((1, 4)), np.ones(4), 1e-6) == 0).all()
    x = np.float32([[1, 2, 3, 4.1]])
    out = rms_norm(x, np.ones(4, np.float32), 1e-6, round_bf16)
    assert out.dtype == np.float32
    assert (out == round_bf16(rms_norm(x, np.ones(4, np.float32), 1e-6))).all()
