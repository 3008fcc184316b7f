"""latent_append against rms_norm, rope and cache_append, bit for bit, and against the reference."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch

from kdtree_nb import reference
from kdtree_nb.native import ops

pytestmark = pytest.mark.usefixtures("on_device")
BY_VALUE = pytest.mark.cpu_only("a GPU does not look at values: tests/cuda/test_bad_values.py")
STREAMS, SLOTS, POSITIONS, EPS = 3, 90, 200, 1e-5
SIZES = [
    (0, 0, 8, 4), (1, 0, 1, 2), (1, 1536, 512, 64), (17, 0, 64, 16), (5, 24, 48, 12), (65, 33, 17, 6),
    (3, 4096, 512, 64), (2, 30008, 8200, 64),
]  # fmt: skip
"""T, Q, C, R."""


class Joint(NamedTuple):
    """Arguments of latent_append but the cache."""

    q_kv: torch.Tensor
    q_norm: torch.Tensor | None
    kv_norm: torch.Tensor
    cos_sin: torch.Tensor
    rows: ops.Rows


@pytest.fixture
def joint(normal, rng):
    """joint(T, Q, C, R) -> Joint and a cache of random values."""

    def make(T: int, Q: int, C: int, R: int) -> tuple[Joint, torch.Tensor]:
        place = rng.permutation(STREAMS * SLOTS)[:T]
        stream, slot, position = (
            torch.from_numpy(x.astype(np.int32)) for x in (place // SLOTS, place % SLOTS, rng.integers(0, POSITIONS, T))
        )
        cos_sin = torch.from_numpy(reference.rope_table(POSITIONS, R, 1e4).astype(np.float32))
        rows = ops.Rows(stream, slot, position, slot, torch.zeros(T, dtype=torch.int64))
        q_norm = normal(Q) if Q else None
        return Joint(normal(T, Q + C + R, scale=3.0), q_norm, normal(C), cos_sin, rows), normal(STREAMS, SLOTS, C + R)

    return make


def apart(cache: torch.Tensor, a: Joint) -> torch.Tensor:
    """The operations that latent_append stands for."""
    R = a.cos_sin.shape[1]
    Q = a.q_kv.shape[1] - len(a.kv_norm) - R
    latent = ops.rms_norm(a.q_kv[:, Q:-R], a.kv_norm, EPS)
    key = ops.rope(a.q_kv[:, None, -R:], a.cos_sin, a.rows.position).squeeze(1)
    ops.cache_append(cache, latent, key, a.rows.stream, a.rows.slot)
    return a.q_kv.new_empty(len(a.q_kv), 0) if a.q_norm is None else ops.rms_norm(a.q_kv[:, :Q], a.q_norm, EPS)


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_has_the_bits_of_the_operations_it_stands_for(sizes, settled, joint, assert_same_bits):
    a, cache = joint(*sizes)
    want = cache.clone()
    assert_same_bits(ops.latent_append(cache, *a, EPS, settled), apart(want, a))
    assert_same_bits(cache, want)


@pytest.mark.parametrize("sizes", SIZES[:-1])
def test_equals_the_reference(sizes, joint, exactly, assert_close, rounding):
    a, cache = joint(*sizes)
    want, rows = exactly(cache).copy(), a.rows
    weights = [None if x is None else exactly(x) for x in (a.q_norm, a.kv_norm, a.cos_sin)]
    places = [x.numpy() for x in (rows.position, rows.stream, rows.slot)]
    want_q = reference.latent_append(want, exactly(a.q_kv), *weights, *places, EPS, rounding)
    assert_close(ops.latent_append(cache, *a, EPS), want_q, np.abs(want_q))
    assert_close(cache, want, np.abs(want) + 12.0)


def test_strided_rows_are_read_in_place(joint, normal, assert_same_bits):
    a, cache = joint(7, 24, 48, 16)
    wide, want = normal(7, 3 + 88 + 2), cache.clone()
    view = a._replace(q_kv=wide[:, 3:-2])
    dense = a._replace(q_kv=wide[:, 3:-2].contiguous())
    assert_same_bits(ops.latent_append(cache, *view, EPS), ops.latent_append(want, *dense, EPS))
    assert_same_bits(cache, want)


def test_a_row_has_the_same_bits_among_any_rows_and_threads(joint, assert_same_bits, num_threads):
    a, cache = joint(200, 96, 48, 12)
    want = cache.clone()
    with num_threads(1):
        alone = []
        for t in range(200):
            rows = ops.Rows(*(x[t : t + 1] for x in a.rows[:5]))
            alone.append(ops.latent_append(want, a.q_kv[t : t + 1], *a[1:4], rows, EPS))
    for threads in (1, 2):
        with num_threads(threads):
            assert_same_bits(ops.latent_append(cache, *a, EPS), torch.cat(alone))
        assert_same_bits(cache, want)


def test_nan_stays_in_its_row(joint):
    a, cache = joint(3, 24, 48, 16)
    cache.fill_(0.0)
    a.q_kv[0, 3], a.q_kv[1, 24 + 5] = float("nan"), float("nan")
    q = ops.latent_append(cache, *a, EPS)
    assert q[0].isnan().all() and q[1:].isfinite().all()
    written = cache[a.rows.stream.long(), a.rows.slot.long()]
    assert written[1, :48].isnan().all() and written[1, 48:].isfinite().all() and cache.isnan().sum() == 48


def test_opcheck(joint, opcheck):
    for sizes in ((3, 24, 48, 16), (3, 0, 48, 16)):
        a, cache = joint(*sizes)
        opcheck("latent_append", cache, *a[:4], a.rows.position, a.rows.stream, a.rows.slot, EPS)


@BY_VALUE
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("position", POSITIONS, f"position: expected 0 … {POSITIONS - 1}, got {POSITIONS} at index 1"),
        ("position", -1, f"position: expected 0 … {POSITIONS - 1}, got -1 at index 1"),
        ("stream", STREAMS, f"stream: expected 0 … {STREAMS - 1}, got {STREAMS} at index 1"),
        ("slot", SLOTS, f"slot: expected 0 … {SLOTS - 1}, got {SLOTS} at index 1"),
        ("slot", -3, f"slot: expected 0 … {SLOTS - 1}, got -3 at index 1"),
    ],
)
def test_names_bad_input_and_writes_nothing(field, value, message, joint):
    a, cache = joint(3, 24, 48, 16)
    before = cache.clone()
    getattr(a.rows, field)[1] = value
    with pytest.raises(ValueError, match=f"latent_append: {message}"):
        ops.latent_append(cache, *a, EPS)
    assert cache.equal(before)


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("q_kv", lambda x: x[:, 1:].contiguous(), r"q_kv: expected shape .*3, 88.*got .*3, 87"),
        ("q_kv", lambda x: x.double(), "q_kv: expected dtype"),
        ("q_kv", lambda x: x.T.contiguous().T, "q_kv: expected stride 1"),
        ("q_norm", lambda x: x[1:], r"q_kv: expected shape .*3, 87.*got .*3, 88"),
        ("q_norm", lambda x: None, r"q_kv: expected shape .*3, 64.*got .*3, 88"),
        ("kv_norm", lambda x: x[1:], r"cache: expected shape .*63.*got .*64"),
        ("cos_sin", lambda x: x[:, 1:].contiguous(), "cos_sin: expected an even last dimension R, got 15"),
    ],
)
def test_names_bad_shapes(field, change, message, joint):
    a, cache = joint(3, 24, 48, 16)
    with pytest.raises(ValueError, match=f"latent_append: {message}"):
        ops.latent_append(cache, *a._replace(**{field: change(getattr(a, field))}), EPS)
