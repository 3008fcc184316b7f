"""latent_append against its definition, row by row."""

from __future__ import annotations

import numpy as np
import pytest

from kdtree_nb.reference import latent_append, rope_table


def arguments(T, Q, C, R):
    rng = np.random.default_rng(3)
    joint, table = rng.standard_normal((T, Q + C + R)), rope_table(20, R, 1e4)
    norms = (rng.standard_normal(Q) if Q else None), rng.standard_normal(C)
    place = rng.permutation(2 * 9)[:T]
    return joint, *norms, table, rng.integers(0, 20, T), place // 9, place % 9


@pytest.mark.parametrize("sizes", [(0, 3, 4, 2), (1, 0, 1, 2), (7, 5, 6, 4)])
def test_each_row_is_normed_turned_and_cached(sizes):
    _, Q, C, R = sizes
    joint, q_norm, kv_norm, table, position, stream, slot = arguments(*sizes)
    cache = np.full((2, 9, C + R), np.nan)
    q = latent_append(cache, joint, q_norm, kv_norm, table, position, stream, slot, 0.5)
    for t, row in enumerate(joint):
        latent, (first, second) = row[Q : Q + C], np.split(row[Q + C :], 2)
        cos, sin = np.split(table[position[t]], 2)
        turned = (first + 1j * second) * (cos + 1j * sin)
        want = [*(latent * kv_norm / (latent @ latent / C + 0.5) ** 0.5), *turned.real, *turned.imag]
        assert np.allclose(cache[stream[t], slot[t]], want, rtol=1e-13)
        if Q:
            assert np.allclose(q[t], row[:Q] * q_norm / (row[:Q] @ row[:Q] / Q + 0.5) ** 0.5, rtol=1e-13)
    assert q.shape == (len(joint), Q) and np.isfinite(cache).sum() == len(joint) * (C + R)


@pytest.mark.parametrize(("index", "name"), [(4, "rope: expected positions"), (6, "cache_append: expected slot")])
def test_nothing_is_written_where_an_index_is_outside(index, name):
    values = list(arguments(3, 5, 6, 4))
    values[index] = np.array([0, 99, 1])
    cache = np.zeros((2, 9, 10))
    with pytest.raises(ValueError, match=name):
        latent_append(cache, *values, 0.5)
    assert (cache == 0).all()
