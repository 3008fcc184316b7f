"""Shared by the tests of the native operations: inputs, comparisons that fail on NaN, thread counts, opcheck."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

from kdtree_nb import ops
from kdtree_nb.native.ops.namespace import native
from kdtree_nb.reference import exact, round_bf16
from kdtree_nb.tree import DraftTree

IN_PLACE = {"cache_append": 1, "latent_append": 1, "cache_compact": 1, "context_append": 2}
"""How many of the first arguments change."""


def moved(value, device: torch.device):
    """`value` with its tensors on `device`: the same strides, and the same place in as large a storage."""
    if isinstance(value, DraftTree):
        return DraftTree(*(moved(field, device) for field in vars(value).values()))
    if isinstance(value, tuple):
        parts = [moved(part, device) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        return [moved(part, device) for part in value]
    if not isinstance(value, torch.Tensor):
        return value
    storage = torch.empty(0, dtype=value.dtype, device=value.device).set_(value.untyped_storage())
    return storage.to(device).as_strided(value.size(), value.stride(), value.storage_offset())


class OpsOn:
    """`kdtree_nb.ops` on a device, for tests that hold CPU tensors: arguments move there, results come back."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __getattr__(self, name: str):
        function = getattr(ops, name)
        if isinstance(function, type):
            return function

        def call(*args, **keywords):
            there = moved(args, self._device)
            result = function(*there, **{key: moved(value, self._device) for key, value in keywords.items()})
            for mine, changed in zip(args[: IN_PLACE.get(name, 0)], there, strict=False):
                mine.copy_(changed)
            return moved(result, torch.device("cpu"))

        return call


@pytest.fixture
def on_device(device, request, monkeypatch) -> None:
    """`ops` of the test's module runs on every device of this machine."""
    if device.type != "cpu":
        monkeypatch.setattr(request.module, "ops", OpsOn(device))


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def dtype(request) -> torch.dtype:
    """Both types of activations and weights."""
    return request.param


@pytest.fixture
def rounding(dtype):
    """What the reference rounds with, for this dtype."""
    return exact if dtype == torch.float32 else round_bf16


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20261)


@pytest.fixture
def normal(rng, dtype):
    """normal(*shape) -> standard normal tensor of the test's dtype."""

    def make(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape) * scale).to(dtype)

    return make


@pytest.fixture
def exactly():
    """exactly(tensor) -> the same values as a float64 array."""
    return lambda tensor: tensor.cpu().to(torch.float64).numpy()


@pytest.fixture
def assert_close(exactly):
    """assert_close(got, want, bound, rounded): |got - want| within the FP32 error of terms that add up to `bound`, plus
    one last place of the result and of `rounded`, a value on the way that was rounded to the dtype. A NaN fails."""

    def check(
        got: torch.Tensor, want: np.ndarray, bound: np.ndarray | float, rounded: np.ndarray | float = 0.0
    ) -> None:
        assert tuple(got.shape) == want.shape
        last_place = 2.0**-7 if got.dtype == torch.bfloat16 else 2.0**-23
        tolerance = 2e-6 * bound + last_place * (np.abs(want) + np.abs(rounded))
        error = np.abs(exactly(got) - want)
        assert np.all(error <= tolerance), f"largest error {np.nanmax(error)}, NaN: {np.isnan(exactly(got)).sum()}"

    return check


@pytest.fixture
def assert_same_bits():
    """Bitwise equality of two tensors."""

    def check(a: torch.Tensor, b: torch.Tensor) -> None:
        assert a.dtype == b.dtype and a.shape == b.shape
        assert a.contiguous().view(torch.uint8).equal(b.contiguous().view(torch.uint8))

    return check


@pytest.fixture
def num_threads():
    """num_threads(n): a context in which torch (and so every kernel) uses n threads."""

    @contextlib.contextmanager
    def use(n: int):
        before = torch.get_num_threads()
        torch.set_num_threads(n)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    return use


@pytest.fixture
def opcheck(device):
    """opcheck(name, *args): schema, fake kernel and dispatch of one native operator agree with what it does."""

    def check(name: str, *args) -> None:
        operator = getattr(getattr(torch.ops, native.load()), name)
        torch.library.opcheck(operator.default, moved(args, device))

    return check


@pytest.fixture
def fma32():
    """fma32(a, b, c) -> a * b + c on float32 arrays, rounded once.

    The product is exact in float64. The sum's last bit is made odd when it is inexact, so that the second rounding (to
    float32) sees on which side of a tie the value lies.
    """

    def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        product, addend = np.float64(a) * np.float64(b), np.float64(c)
        total = product + addend
        part = total - product
        error = (product - (total - part)) + (addend - part)
        is_even = (total.view(np.int64) & 1) == 0
        toward = np.where(error > 0, np.inf, -np.inf)
        return np.where((error != 0) & is_even, np.nextafter(total, toward), total).astype(np.float32)

    return fma
