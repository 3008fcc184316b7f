"""rope against float64 and against itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kdtree_nb import reference
from kdtree_nb.native import ops

pytestmark = pytest.mark.usefixtures("on_device")
BY_VALUE = pytest.mark.cpu_only("a GPU does not look at values: tests/cuda/test_bad_values.py")


@pytest.fixture
def table():
    """table(R) -> cos_sin f32 [4096, R]."""
    return lambda dim: torch.from_numpy(reference.rope_table(4096, dim, 1e4).astype(np.float32))


@pytest.mark.parametrize("shape", [(0, 2, 4), (1, 1, 2), (17, 6, 12), (3, 4, 16), (65, 2, 34), (2, 1, 64)])
def test_equals_the_reference(shape, table, normal, rng, exactly, assert_close, rounding):
    T, _, R = shape
    x, cos_sin = normal(*shape), table(R)
    position = torch.from_numpy(rng.integers(0, 4096, T).astype(np.int32))
    want = reference.rope(exactly(x), exactly(cos_sin), position.numpy(), rounding)
    assert_close(ops.rope(x, cos_sin, position), want, np.abs(exactly(x)).max(initial=0) * 2)


def test_position_zero_is_the_identity_and_rotation_keeps_lengths(table, normal):
    x = normal(4, 3, 16)
    assert ops.rope(x, table(16), torch.zeros(4, dtype=torch.int32)).equal(x)
    turned = ops.rope(x.float(), table(16), torch.tensor([1, 7, 100, 4095], dtype=torch.int32))
    torch.testing.assert_close(turned.norm(dim=-1), x.float().norm(dim=-1))


def test_a_row_has_the_same_bits_among_any_rows_and_threads(table, normal, assert_same_bits, num_threads):
    x, cos_sin, position = normal(2000, 6, 12), table(12), torch.arange(2000, dtype=torch.int32)
    with num_threads(1):
        alone = torch.cat([ops.rope(x[t : t + 1], cos_sin, position[t : t + 1]) for t in range(2000)])
    with num_threads(2):
        for count in (2, 17, 2000):
            assert_same_bits(ops.rope(x[:count], cos_sin, position[:count]), alone[:count])


def test_strided_heads_are_read_in_place(table, normal, assert_same_bits):
    wide, position = normal(5, 3, 40), torch.arange(5, dtype=torch.int32)
    view = wide[:, :, 24:36]
    assert_same_bits(ops.rope(view, table(12), position), ops.rope(view.contiguous(), table(12), position))


def test_opcheck(table, normal, opcheck):
    opcheck("rope", normal(3, 2, 8), table(8), torch.arange(3, dtype=torch.int32))


@BY_VALUE
@pytest.mark.parametrize("position", [[0, 4096], [-1, 0]])
def test_a_position_outside_the_table_is_named(position, table):
    outside = position[position[0] == 0]
    with pytest.raises(ValueError, match=f"rope: position: expected 0 … 4095, got {outside} at index"):
        ops.rope(torch.zeros(2, 1, 8), table(8), torch.tensor(position, dtype=torch.int32))


@pytest.mark.parametrize(
    ("x", "position", "message"),
    [
        (torch.zeros(2, 1, 8), torch.tensor([0, 1]), "rope: position: expected dtype Int, got Long"),
        (torch.zeros(2, 1, 7), torch.tensor([0, 1], dtype=torch.int32), "rope: x: expected an even last dimension"),
        (torch.zeros(2, 1, 6), torch.tensor([0, 1], dtype=torch.int32), r"rope: cos_sin: expected shape .*6.*got .*8"),
    ],
)
def test_bad_input_is_named(x, position, message, table):
    with pytest.raises(ValueError, match=message):
        ops.rope(x, table(8), position)
