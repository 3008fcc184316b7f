"""embed: rows, and no silent negative index."""

from __future__ import annotations

import numpy as np
import pytest

from kdtree_nb.reference import embed


def test_rows():
    weight = np.arange(12.0).reshape(4, 3)
    assert embed(weight, np.array([3, 0, 3])).tolist() == [[9, 10, 11], [0, 1, 2], [9, 10, 11]]
    assert embed(weight, np.array([], int)).shape == (0, 3)


@pytest.mark.parametrize("token", [-1, 4])
def test_ids_outside(token):
    with pytest.raises(ValueError, match=rf"embed: expected token ids in 0 … 3, got {token}"):
        embed(np.zeros((4, 3)), np.array([0, token]))
