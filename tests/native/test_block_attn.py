"""context_append and block_attn against the reference, torch's attention, and each other; nothing else is read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kdtree_nb import reference
from kdtree_nb.native import ops

pytestmark = pytest.mark.usefixtures("on_device")
BY_VALUE = pytest.mark.cpu_only("a GPU does not look at values: tests/cuda/test_bad_values.py")
EPS = 1e-5


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def angles(num_positions: int, dim: int) -> torch.Tensor:
    return torch.from_numpy(reference.rope_table(num_positions, dim, 1e4)).float()


SHAPES = {
    # streams, layers, query heads, key-value heads, head length, block size, slots; prefixes by block (None: free)
    "one of all": (1, 1, 1, 1, 2, 1, 1, [0]),
    "nano": (2, 3, 8, 4, 40, 16, 200, [150, 0]),
    "odd lengths": (3, 2, 6, 2, 20, 6, 70, [64, 3, 17, 64, 0]),
    "heads of 128": (1, 2, 8, 1, 128, 8, 300, [300, 287]),
    "heads of 256": (1, 1, 3, 1, 256, 3, 40, [16]),
    "many tokens": (1, 1, 2, 1, 24, 64, 120, [33, 100]),
    "long": (1, 1, 4, 2, 64, 8, 1100, [1093, 1024]),
}
"""By name: S, Y, H, K, d, b, P and the prefix_len of each block."""

SEES = {"all": (None, False), "causal": (None, True), "window": (7, False), "causal window": (33, True)}


class Problem:
    """A context of random keys and values, and blocks behind it; what is not seen by any block of a stream is NaN."""

    def __init__(self, normal, rng, name: str, sees: str = "all", scale: float = 1.0) -> None:
        S, self.num_layers, self.H, self.K, self.d, self.b, P, prefixes = SHAPES[name]
        self.window, self.causal = SEES[sees]
        self.prefix_len = int32(prefixes)
        self.stream = torch.from_numpy(rng.integers(0, S, len(prefixes)).astype(np.int32))
        self.keys, self.values = (normal(S, P, self.num_layers, self.K, self.d, scale=scale) for _ in range(2))
        self.qkv = normal(len(prefixes), self.b, (self.H + 2 * self.K) * self.d)
        self.query_norm, self.key_norm = normal(self.d), normal(self.d)
        self.cos_sin = angles(P + self.b, self.d)
        self.layer = self.num_layers - 1
        self.scale = self.d**-0.5

    def poison(self) -> None:
        """NaN wherever no token of a block looks: other layers, other streams, slots outside."""
        seen = torch.zeros(self.keys.shape[:2], dtype=torch.bool)
        for s, prefix in zip(self.stream.tolist(), self.prefix_len.tolist(), strict=True):
            sees = reference.block_sees(prefix, self.b, self.window, self.causal)[:, :prefix].any(0)
            seen[s, :prefix] |= torch.from_numpy(sees)
        for cache in (self.keys, self.values):
            others = torch.arange(self.num_layers) != self.layer
            cache[:, :, others] = torch.nan
            cache[~seen] = torch.nan

    def native(self, blocks=slice(None)) -> torch.Tensor:
        return ops.block_attn(
            self.qkv[blocks], self.query_norm, self.key_norm, EPS, self.cos_sin, self.keys, self.values, self.layer,
            self.stream[blocks], self.prefix_len[blocks], self.scale, self.window, self.causal,
        )  # fmt: skip

    def reference(self, exactly, rounding) -> np.ndarray:
        qkv, *norms, table, keys, values = map(
            exactly, (self.qkv, self.query_norm, self.key_norm, self.cos_sin, self.keys, self.values)
        )
        place = (self.layer, self.stream.numpy(), self.prefix_len.numpy(), self.scale, self.window, self.causal)
        return reference.block_attn(qkv, *norms, EPS, table, keys, values, *place, rounding)


@pytest.mark.parametrize("sees", SEES)
@pytest.mark.parametrize("name", SHAPES)
def test_equals_the_reference(name, sees, normal, rng, exactly, rounding, dtype):
    problem = Problem(normal, rng, name, sees)
    problem.poison()
    got, want = exactly(problem.native()), problem.reference(exactly, rounding)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert got.shape == want.shape and np.all(np.abs(got - want) <= tolerance * np.abs(want).max())


@pytest.mark.parametrize("sees", SEES)
@pytest.mark.parametrize("name", ["nano", "odd lengths", "long"])
def test_equals_the_attention_of_torch(name, sees, rng):
    """Norms, angles, copies and a mask over all slots, as one would write it in torch."""
    problem = Problem(lambda *s, scale=1.0: torch.from_numpy(rng.standard_normal(s)).float(), rng, name, sees)
    A, H, K, d, b = len(problem.stream), problem.H, problem.K, problem.d, problem.b
    heads = problem.qkv.view(A * b, H + 2 * K, d)
    position = (problem.prefix_len[:, None] + torch.arange(b, dtype=torch.int32)).flatten()

    def turned(x, weight):
        return ops.rope(ops.rms_norm(x.reshape(-1, d), weight, EPS).view(A * b, -1, d), problem.cos_sin, position)

    q = turned(heads[:, :H], problem.query_norm).view(A, b, H, d).transpose(1, 2)
    keys, values = (
        torch.cat([cache[problem.stream.long(), :, problem.layer], torch.zeros(A, b, K, d)], 1)
        for cache in (problem.keys, problem.values)
    )
    slot = position.view(A, b).long()
    keys[torch.arange(A)[:, None], slot] = turned(heads[:, H : H + K], problem.key_norm).view(A, b, K, d)
    values[torch.arange(A)[:, None], slot] = heads[:, H + K :].reshape(A, b, K, d)
    mask = torch.zeros(A, 1, b, keys.shape[1], dtype=torch.bool)
    for a, prefix in enumerate(problem.prefix_len.tolist()):
        seen = reference.block_sees(prefix, b, problem.window, problem.causal)
        mask[a, 0, :, : prefix + b] = torch.from_numpy(seen)
    wide_keys, wide_values = (x.transpose(1, 2).repeat_interleave(H // K, 1) for x in (keys, values))
    want = scaled_dot_product_attention(q, wide_keys, wide_values, attn_mask=mask).transpose(1, 2).reshape(A, b, H * d)
    got = problem.native()
    assert got.isfinite().all() and (got - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("name", ["nano", "odd lengths", "long"])
def test_a_block_does_not_depend_on_the_others(name, normal, rng, assert_same_bits, num_threads):
    problem = Problem(normal, rng, name, "window")
    with num_threads(2):
        together = problem.native()
    for block in range(len(problem.stream)):
        assert_same_bits(problem.native(slice(block, block + 1)), together[block : block + 1])
    assert_same_bits(problem.native(), together)


def test_large_scores(normal, rng, exactly, rounding, dtype):
    """Weights that all but vanish, and a maximum that grows along the context."""
    problem = Problem(normal, rng, "nano")
    problem.keys *= torch.linspace(0, 40, problem.keys.shape[1]).to(dtype)[:, None, None, None]
    got, want = exactly(problem.native()), problem.reference(exactly, rounding)
    assert np.all(np.abs(got - want) <= (1e-4 if dtype == torch.float32 else 0.1) * np.abs(want).max())


@pytest.mark.parametrize("where", ["keys", "values"])
def test_a_nan_in_the_context_is_a_nan_in_the_result(where, normal, rng):
    problem = Problem(normal, rng, "nano")
    problem.stream = int32([0, 1])
    getattr(problem, where)[0, 3, problem.layer] = torch.nan
    got = problem.native()
    assert got[0].isnan().any(-1).all() and got[1].isfinite().all()


@pytest.mark.parametrize("num_rows", [0, 1, 17])
@pytest.mark.parametrize("shape", [(3, 2, 20), (1, 1, 2), (6, 8, 128)])
def test_append_equals_the_reference(num_rows, shape, normal, rng, exactly, rounding, assert_close):
    num_layers, K, d = shape
    keys, values = (normal(2, 30, num_layers, K, d) for _ in range(2))
    kv, key_norm, table = normal(num_rows, 2 * num_layers * K * d, scale=3.0), normal(num_layers, d), angles(30, d)
    place = rng.permutation(60)[:num_rows].astype(np.int32)
    stream, position = place // 30, place % 30
    position[2::3], stream[2::3] = -1, 99  # no tokens
    kv[2::3] = torch.nan
    want = [exactly(keys).copy(), exactly(values).copy()]
    inputs = (exactly(kv), exactly(key_norm), EPS, exactly(table), stream, position)
    reference.context_append(*want, *inputs, rounding)
    ops.context_append(keys, values, kv, key_norm, EPS, table, torch.from_numpy(stream), torch.from_numpy(position))
    assert np.array_equal(exactly(values), want[1])
    assert_close(keys, want[0], np.abs(want[0]).max())


def test_a_context_is_what_a_block_before_it_was(normal, rng, assert_same_bits, exactly, dtype):
    """Keys and values of a block, appended, are those that the block itself saw."""
    problem = Problem(normal, rng, "odd lengths", "causal")
    first, K, d = 8, problem.K, problem.d
    problem.stream[:], problem.prefix_len[:] = 0, first
    parts = problem.qkv[:1].view(problem.b, -1, d)
    kv = torch.stack([parts[:, problem.H : problem.H + K], parts[:, problem.H + K :]], 1)
    layer = (problem.keys[:, :, problem.layer :].clone(), problem.values[:, :, problem.layer :].clone())
    position = int32(range(first, first + problem.b))
    ops.context_append(*layer, kv.flatten(1), problem.key_norm[None], EPS, problem.cos_sin, int32([0] * problem.b),
                       position)  # fmt: skip
    last = problem.b - 1
    tail = problem.qkv[:1, last:].clone()
    got = ops.block_attn(tail, problem.query_norm, problem.key_norm, EPS, problem.cos_sin, *layer, 0, int32([0]),
                         int32([first + last]), problem.scale)  # fmt: skip
    want = problem.native(slice(0, 1))[:, last:]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert np.abs(exactly(got) - exactly(want)).max() <= tolerance * np.abs(exactly(want)).max()


def test_opcheck(opcheck, normal, rng):
    problem = Problem(normal, rng, "odd lengths", "window")
    opcheck("block_attn", problem.qkv, problem.query_norm, problem.key_norm, EPS, problem.cos_sin, problem.keys,
            problem.values, 1, problem.stream, problem.prefix_len, 0.2, 7, True)  # fmt: skip
    caches = (normal(2, 5, 3, 2, 4), normal(2, 5, 3, 2, 4))
    opcheck("context_append", *caches, normal(1, 48), normal(3, 4), EPS, angles(5, 4), int32([1]), int32([4]))


@BY_VALUE
@pytest.mark.parametrize(
    ("stream", "position", "message"),
    [
        ([0, 2], [0, 1], "context_append: stream: expected 0 … 1, got another"),
        ([0, -1], [0, 1], "context_append: stream: expected 0 … 1, got another"),
        ([0, 1], [0, 5], "context_append: position: expected -1 … 4, got 5 at index 1"),
        ([0, 1], [-2, 0], "context_append: position: expected -1 … 4, got -2 at index 0"),
    ],
)
def test_nothing_is_appended_outside(stream, position, message):
    keys, values = torch.zeros(2, 5, 1, 1, 4), torch.zeros(2, 5, 1, 1, 4)
    with pytest.raises(ValueError, match=message):
        ops.context_append(keys, values, torch.ones(2, 8), torch.ones(1, 4), EPS, angles(5, 4), int32(stream),
                           int32(position))  # fmt: skip
    assert not keys.any() and not values.any()


@BY_VALUE
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("stream", 2, "stream: expected 0 … 1, got 2 at index 1"), ("stream", -1, "stream: expected 0 … 1, got -1"),
        ("prefix_len", 201, "prefix_len: expected 0 … 200, got 201"), ("prefix_len", -1, "prefix_len: .* got -1"),
    ],
)  # fmt: skip
def test_blocks_that_cannot_be(field, value, message, normal, rng):
    problem = Problem(normal, rng, "nano")
    getattr(problem, field)[1] = value
    with pytest.raises(ValueError, match=f"block_attn: {message}"):
        problem.native()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer": 3}, "layer: expected 0 … 2, got 3"), ({"window": -1}, "window: expected 0 … "),
        ({"qkv": (2, 16, 9 * 40)}, "qkv: expected queries of a multiple of 4 heads of 40"),
        ({"qkv": (2, 65, 16 * 40)}, "block size b: expected 1 … 64, got 65"),
        ({"query_norm": (39,)}, "query_norm: expected shape"), ({"cos_sin": (200, 38)}, "cos_sin: expected "),
    ],
)  # fmt: skip
def test_shapes_that_do_not_fit(changes, message, rng):
    problem = Problem(lambda *s, scale=1.0: torch.from_numpy(rng.standard_normal(s)).float(), rng, "nano")
    for name, value in changes.items():
        setattr(problem, name, torch.zeros(value) if isinstance(value, tuple) else value)
    with pytest.raises(ValueError, match=f"block_attn: {message}"):
        problem.native()
