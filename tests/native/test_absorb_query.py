"""absorb_query against linear_heads and rope, bit for bit, and against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kdtree_nb import reference
from kdtree_nb.native import ops

pytestmark = pytest.mark.usefixtures("on_device")
BY_VALUE = pytest.mark.cpu_only("a GPU does not look at values: tests/cuda/test_bad_values.py")
POSITIONS = 200
SIZES = [
    (0, 2, 8, 16, 4), (1, 1, 1, 1, 2), (1, 8, 512, 128, 64), (8, 8, 512, 128, 64), (13, 8, 512, 128, 64),
    (23, 64, 64, 32, 16), (17, 6, 48, 32, 12), (33, 3, 40, 24, 8), (65, 8, 512, 128, 64), (300, 4, 64, 32, 16),
    (5, 2, 17, 33, 6),
]  # fmt: skip
"""T, H, C, K, R: rows for each shape of the product."""


@pytest.fixture
def arguments(normal, rng):
    """arguments(T, H, C, K, R) -> q, W, cos_sin, position."""

    def make(T: int, H: int, C: int, K: int, R: int):
        cos_sin = torch.from_numpy(reference.rope_table(POSITIONS, R, 1e4).astype(np.float32))
        position = torch.from_numpy(rng.integers(0, POSITIONS, T).astype(np.int32))
        return normal(T, H * (K + R)), normal(H, C, K, scale=K**-0.5), cos_sin, position

    return make


def parts(q: torch.Tensor, H: int, K: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense copies of q_nope [T, H, K] and q_rope [T, H, R]."""
    return q[:, : H * K].reshape(len(q), H, K), q[:, H * K :].reshape(len(q), H, q.shape[1] // H - K)


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_has_the_bits_of_the_operations_it_stands_for(sizes, settled, arguments, assert_same_bits):
    q, weight, cos_sin, position = arguments(*sizes)
    packed = ops.pack_linear(weight)
    packed = packed._replace(settled=packed.settled and settled)
    q_latent, q_rope = ops.absorb_query(q, packed, cos_sin, position)
    nope, rope = parts(q, sizes[1], sizes[3])
    assert_same_bits(q_latent, ops.linear_heads(nope, packed))
    assert_same_bits(q_rope, ops.rope(rope, cos_sin, position))


@pytest.mark.parametrize("sizes", SIZES)
def test_equals_the_reference(sizes, arguments, exactly, assert_close, rounding):
    q, weight, cos_sin, position = arguments(*sizes)
    got = ops.absorb_query(q, ops.pack_linear(weight), cos_sin, position)
    want = reference.absorb_query(exactly(q), exactly(weight), exactly(cos_sin), position.numpy(), rounding)
    size = np.abs(exactly(q)).max(initial=0)
    assert_close(got[0], want[0], size * np.abs(exactly(weight)).sum(2).max(initial=0))
    assert_close(got[1], want[1], 2 * size)


def test_strided_rows_are_read_in_place(arguments, normal, assert_same_bits):
    for pad in (3, 8):
        _, weight, cos_sin, position = arguments(7, 2, 24, 32, 8)
        view, packed = normal(7, 80 + 2 * pad)[:, pad:-pad], ops.pack_linear(weight)
        got = ops.absorb_query(view, packed, cos_sin, position)
        for one, other in zip(got, ops.absorb_query(view.contiguous(), packed, cos_sin, position), strict=True):
            assert_same_bits(one, other)


def test_a_row_has_the_same_bits_among_any_rows(arguments, assert_same_bits):
    q, weight, cos_sin, position = arguments(100, 8, 64, 128, 64)
    packed = ops.pack_linear(weight)
    alone = [ops.absorb_query(q[t : t + 1], packed, cos_sin, position[t : t + 1]) for t in range(100)]
    for count in (2, 8, 9, 17, 31, 65, 100):
        for i, part in enumerate(ops.absorb_query(q[:count], packed, cos_sin, position[:count])):
            assert_same_bits(part, torch.cat([row[i] for row in alone[:count]]))


def test_opcheck(arguments, opcheck):
    q, weight, cos_sin, position = arguments(3, 2, 24, 32, 8)
    opcheck("absorb_query", q, ops.pack_linear(weight).data, 2, 24, cos_sin, position)


@BY_VALUE
@pytest.mark.parametrize("outside", [-1, POSITIONS])
def test_a_position_outside_the_table_is_named(outside, arguments):
    q, weight, cos_sin, position = arguments(3, 2, 24, 32, 8)
    position[1] = outside
    message = f"absorb_query: position: expected 0 … {POSITIONS - 1}, got {outside} at index 1"
    with pytest.raises(ValueError, match=message):
        ops.absorb_query(q, ops.pack_linear(weight), cos_sin, position)


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        (0, lambda x: x[:, 1:].contiguous(), r"q: expected 2 \* \(64 \+ 8\) columns .* K = 64, got 143"),
        (0, lambda x: x.double(), "q: expected dtype"),
        (1, lambda x: x[:, :, 1:].contiguous(), r"q: expected 2 \* \(63 \+ 8\) columns .* K = 63, got 144"),
        (2, lambda x: x[:, 1:].contiguous(), r"q: expected 2 \* \(64 \+ 7\) columns .* K = 64, got 144"),
        (3, lambda x: x[1:], r"position: expected shape .*3.*got .*2"),
    ],
)
def test_names_bad_input(field, change, message, arguments):
    values = list(arguments(3, 2, 24, 64, 8))
    values[field] = change(values[field])
    q, weight, cos_sin, position = values
    with pytest.raises(ValueError, match=f"absorb_query: {message}"):
        ops.absorb_query(q, ops.pack_linear(weight), cos_sin, position)
