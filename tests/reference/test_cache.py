"""cache_append and cache_compact against plain loops, unused slots poisoned."""

from __future__ import annotations

import numpy as np
import pytest

from kdtree_nb.reference import cache_append, cache_compact


def test_append_writes_its_slots_and_no_other():
    cache = np.full((2, 4, 5), np.nan)
    latent, k_rope = np.arange(9.0).reshape(3, 3), 10 + np.arange(6.0).reshape(3, 2)
    cache_append(cache, latent, k_rope, np.array([1, 0, 1]), np.array([3, 0, 0]))
    assert cache[1, 3].tolist() == [0, 1, 2, 10, 11]
    assert cache[0, 0].tolist() == [3, 4, 5, 12, 13]
    assert cache[1, 0].tolist() == [6, 7, 8, 14, 15]
    assert np.isnan(cache).sum() == 5 * 5


@pytest.mark.parametrize(
    ("stream", "slot", "message"), [(2, 0, "stream in 0 … 1, got 2"), (0, -1, "slot in 0 … 3, got -1")]
)
def test_append_outside(stream, slot, message):
    with pytest.raises(ValueError, match=f"cache_append: expected {message}"):
        cache_append(np.zeros((2, 4, 5)), np.zeros((1, 3)), np.zeros((1, 2)), np.array([stream]), np.array([slot]))


def test_compact_moves_rows_in_every_layer():
    layers, slots = 2, 12
    cache = np.arange(layers * 3 * slots, dtype=float).reshape(layers, 3, slots, 1)
    before = cache.copy()
    prefix_len = np.array([3, 0, 5])
    accepted = np.array([[2, 3, 7], [-1, -1, -1], [1, 5, -1]])
    cache_compact(cache, prefix_len, accepted, np.array([3, 0, 2]))
    assert (cache[:, 0, 4:7] == before[:, 0, [5, 6, 10]]).all()
    assert (cache[:, 2, 6:8] == before[:, 2, [6, 10]]).all()
    for stream, kept in [(0, [0, 1, 2, 3, 7, 8, 9, 10, 11]), (1, range(slots)), (2, [0, 1, 2, 3, 4, 5, 8, 9, 10, 11])]:
        assert (cache[:, stream, list(kept)] == before[:, stream, list(kept)]).all()
