"""cache_append and cache_compact against the reference; nothing else is touched, nothing is written on an error."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kdtree_nb import reference
from kdtree_nb.native import ops

pytestmark = pytest.mark.usefixtures("on_device")
BY_VALUE = pytest.mark.cpu_only("a GPU does not look at values: tests/cuda/test_bad_values.py")


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("shape", [(0, 2, 5, 4, 2), (1, 1, 1, 1, 1), (17, 3, 40, 48, 12), (65, 2, 200, 64, 16)])
def test_append_equals_the_reference(shape, normal, rng, exactly):
    T, S, P, C, R = shape
    cache, latent, k_rope = normal(S, P, C + R), normal(T, C), normal(T, R)
    place = rng.permutation(S * P)[:T].astype(np.int32)
    stream, slot = place // P, place % P
    want = exactly(cache).copy()
    reference.cache_append(want, exactly(latent), exactly(k_rope), stream, slot)
    ops.cache_append(cache, latent, k_rope, torch.from_numpy(stream), torch.from_numpy(slot))
    assert np.array_equal(exactly(cache), want)


def test_append_writes_into_one_layer_of_a_larger_cache(normal):
    whole, latent, k_rope = torch.zeros(3, 2, 5, 6), torch.ones(1, 4), torch.full((1, 2), 2.0)
    ops.cache_append(whole[1], latent, k_rope, int32([1]), int32([4]))
    assert whole[1, 1, 4].tolist() == [1, 1, 1, 1, 2, 2] and whole.count_nonzero() == 6


@pytest.mark.parametrize(
    ("prefix", "paths", "max_depth"),
    [
        ([3], [[]], 0),
        ([0, 4, 2], [[1], [1, 2, 3], []], 3),
        ([5, 0, 9], [[2, 3, 7], [4], [1, 5]], 4),
        ([1, 63, 20], [list(range(1, 31)), list(range(2, 64, 2)), [60]], 40),
    ],
)
def test_compact_equals_the_reference(prefix, paths, max_depth, normal, exactly):
    cache = normal(3, len(prefix), 130, 7)
    padded = np.full((len(prefix), max_depth), -1, np.int32)
    for row, path in zip(padded, paths, strict=True):
        row[: len(path)] = path
    counts = np.array([len(path) for path in paths], np.int32)
    want = exactly(cache).copy()
    reference.cache_compact(want, np.array(prefix), padded, counts)
    ops.cache_compact(cache, int32(prefix), torch.from_numpy(padded), torch.from_numpy(counts))
    assert np.array_equal(exactly(cache), want)


def test_compact_ignores_what_lies_past_num_accepted(normal, assert_same_bits):
    cache = normal(2, 1, 20, 5)
    before = cache.clone()
    ops.cache_compact(cache, int32([3]), int32([[1, 2, 2**30, -7]]), int32([2]))
    assert_same_bits(cache, before)


def test_opcheck(normal, opcheck):
    opcheck("cache_append", normal(2, 5, 6), normal(1, 4), normal(1, 2), int32([1]), int32([4]))
    opcheck("cache_compact", normal(2, 1, 20, 5), int32([3]), int32([[2, 4, -1]]), int32([2]))


@BY_VALUE
@pytest.mark.parametrize(
    ("stream", "slot", "message"),
    [
        ([0, 2], [0, 1], "cache_append: stream: expected 0 … 1, got 2 at index 1"),
        ([-1, 0], [0, 1], "cache_append: stream: expected 0 … 1, got -1 at index 0"),
        ([0, 1], [0, 5], "cache_append: slot: expected 0 … 4, got 5 at index 1"),
        ([0, 1], [0, -3], "cache_append: slot: expected 0 … 4, got -3 at index 1"),
    ],
)
def test_append_names_bad_input_and_writes_nothing(stream, slot, message):
    cache = torch.zeros(2, 5, 6)
    with pytest.raises(ValueError, match=message):
        ops.cache_append(cache, torch.ones(2, 4), torch.ones(2, 2), int32(stream), int32(slot))
    assert cache.eq(0).all()


def test_append_names_bad_shapes():
    with pytest.raises(ValueError, match=r"cache_append: stream: expected shape .*2.*got .*3"):
        ops.cache_append(torch.zeros(2, 5, 6), torch.ones(2, 4), torch.ones(2, 2), int32([0, 1, 1]), int32([0, 1, 1]))
    with pytest.raises(ValueError, match=r"cache_append: k_rope: expected shape .*2, 2.*got .*2, 3"):
        ops.cache_append(torch.zeros(2, 5, 6), torch.ones(2, 4), torch.ones(2, 3), int32([0, 1]), int32([0, 1]))
    with pytest.raises(ValueError, match="cache_append: cache: expected a contiguous tensor"):
        ops.cache_append(torch.zeros(6, 5, 2).mT, torch.ones(2, 4), torch.ones(2, 2), int32([0, 1]), int32([0, 1]))
    with pytest.raises(ValueError, match="cache_append: latent: expected at most the 6 values of a slot, got 7"):
        ops.cache_append(torch.zeros(2, 5, 6), torch.ones(2, 7), torch.ones(2, 3), int32([0, 1]), int32([0, 1]))


@BY_VALUE
@pytest.mark.parametrize(
    ("prefix", "path", "count", "message"),
    [
        ([10], [[3, 2]], [2], "cache_compact: accepted_path: expected node indices of at least 1 that ascend"),
        ([10], [[0, 2]], [2], "cache_compact: accepted_path: expected node indices of at least 1 that ascend"),
        ([10], [[1, -1]], [2], "cache_compact: accepted_path: expected node indices of at least 1 that ascend"),
        ([10], [[1, 10]], [2], "cache_compact: expected accepted nodes at slots below 20"),
        ([10], [[1, 2]], [3], "cache_compact: num_accepted: expected 0 … 2, got 3"),
        ([10], [[1, 2]], [-1], "cache_compact: num_accepted: expected 0 … 2, got -1"),
        ([-1], [[1, 2]], [2], "cache_compact: prefix_len: expected 0 … 20, got -1"),
    ],
)
def test_compact_names_bad_input_and_moves_nothing(prefix, path, count, message):
    cache = torch.arange(2 * 20 * 3, dtype=torch.float32).view(2, 1, 20, 3)
    before = cache.clone()
    with pytest.raises(ValueError, match=message):
        ops.cache_compact(cache, int32(prefix), int32(path), int32(count))
    assert cache.equal(before)
