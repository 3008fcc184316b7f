"""linear and linear_heads against torch, and their two roundings."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kdtree_nb.reference import linear, linear_heads, round_bf16


@pytest.mark.parametrize(("rows", "num_out", "num_in"), [(1, 1, 1), (3, 31, 33), (2, 64, 65), (0, 3, 5)])
def test_linear(rows, num_out, num_in):
    rng = np.random.default_rng(0)
    x, weight, residual = rng.normal(size=(rows, num_in)), rng.normal(size=(num_out, num_in)), rng.normal(size=num_out)
    want = torch.nn.functional.linear(torch.from_numpy(x), torch.from_numpy(weight)).numpy()
    assert np.abs(linear(x, weight) - want).max(initial=0) <= 1e-12
    assert np.abs(linear(x, weight, residual) - (want + residual)).max(initial=0) <= 1e-12


def test_linear_heads_is_one_linear_per_head():
    rng = np.random.default_rng(1)
    x, weight = rng.normal(size=(5, 3, 7)), rng.normal(size=(3, 4, 7))
    out = linear_heads(x, weight)
    assert out.shape == (5, 3, 4)
    for g in range(3):
        assert np.abs(out[:, g] - linear(x[:, g], weight[g])).max() <= 1e-14


def test_product_and_sum_are_rounded_separately():
    x, weight = np.float32([[1.0, 2.0**-8]]), np.float32([[1.0, 1.0]])  # 1 + 2^-8 is a tie: rounds to 1
    residual = np.float32([[2.0**-7]])
    assert linear(x, weight, residual, round_bf16)[0, 0] == 1 + 2.0**-7  # one rounding would give 1 + 2^-6
    assert linear(x, weight, residual)[0, 0] == 1 + 2.0**-8 + 2.0**-7
