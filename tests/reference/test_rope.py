"""rope against complex multiplication, and its table."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kdtree_nb.reference import rope, rope_table


def test_table():
    table = rope_table(50, 6, 100.0)
    assert table.shape == (50, 6) and table.dtype == np.float64
    for position in (0, 1, 49):
        for i in range(3):
            angle = position * 100.0 ** (-i / 3)
            assert abs(table[position, i] - math.cos(angle)) <= 1e-14
            assert abs(table[position, 3 + i] - math.sin(angle)) <= 1e-14


@pytest.mark.parametrize("dim", [2, 12, 64])
def test_is_a_rotation_of_pairs(dim):
    rng = np.random.default_rng(0)
    x, position = rng.normal(size=(4, 3, dim)), np.array([0, 7, 39, 7])
    table = rope_table(40, dim, 1e4)
    half = dim // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * (table[:, :half] + 1j * table[:, half:])[position][:, None]
    out = rope(x, table, position)
    assert np.abs(out - np.concatenate([turned.real, turned.imag], axis=-1)).max() <= 1e-14
    assert (out[0] == x[0]).all()  # position 0


def test_scores_depend_on_distance_only():
    rng = np.random.default_rng(1)
    q, k = rng.normal(size=(2, 1, 1, 12))
    table = rope_table(100, 12, 1e4)
    scores = [(rope(q, table, [i]) * rope(k, table, [i - 5])).sum() for i in (5, 50, 99)]
    assert np.ptp(scores) <= 1e-12
    assert abs(scores[0] - (q * k).sum()) > 1e-3


@pytest.mark.parametrize("position", [-1, 8])
def test_positions_outside(position):
    with pytest.raises(ValueError, match=rf"rope: expected positions in 0 … 7, got {position}"):
        rope(np.zeros((1, 1, 2)), rope_table(8, 2, 1e4), np.array([position]))
