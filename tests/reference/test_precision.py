"""round_bf16 against torch's bfloat16, and the table of precisions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kdtree_nb.reference import Precision, exact, round_bf16


def torch_bf16(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(x).to(torch.bfloat16).to(torch.float32).numpy()


def test_every_kind_of_float32():
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint64).astype(np.uint32)
    ties = (bits & 0xFFFF0000) | 0x8000  # exactly between two BF16 values
    edges = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x80000000], np.uint32)
    x = np.concatenate([bits, ties, edges]).view(np.float32)
    got, want = round_bf16(x), torch_bf16(x)
    number = ~np.isnan(x)
    assert number.sum() > 150_000
    assert (got.view(np.uint32) == want.view(np.uint32))[number].all()
    assert np.isnan(got[~number]).all() and (~number).any()


def test_every_quiet_and_signalling_nan_stays_nan():
    x = np.array([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001], np.uint32).view(np.float32)
    assert np.isnan(round_bf16(x)).all()


def test_shape_and_dtype_are_kept():
    x = np.linspace(-3, 3, 30).astype(np.float32).reshape(5, 6)
    assert round_bf16(x.T).shape == (6, 5) and round_bf16(x).dtype == np.float32
    assert (round_bf16(x.T) == round_bf16(x).T).all()
    assert (round_bf16(round_bf16(x)) == round_bf16(x)).all() and (round_bf16(x) != x).any()


def test_names():
    assert Precision.named("float64") == ("float64", np.float64, exact)
    assert Precision.named("float32") == ("float32", np.float32, exact)
    assert Precision.named("bf16") == ("bf16", np.float32, round_bf16)
    with pytest.raises(ValueError, match="precision: expected one of .*got 'fp8'"):
        Precision.named("fp8")
