"""swiglu against torch, also at the ends of the range."""

from __future__ import annotations

import warnings

import numpy as np
import torch

from kdtree_nb.reference import swiglu


def test_against_torch():
    gate_up = np.random.default_rng(0).normal(size=(5, 62)) * 10
    gate, up = torch.from_numpy(gate_up).split(31, dim=-1)
    want = (torch.nn.functional.silu(gate) * up).numpy()
    assert np.abs(swiglu(gate_up) - want).max() <= 1e-13


def test_huge_gates():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = swiglu(np.array([[-1e4, 1e4, 0.0, 2.0, 3.0, 5.0]]))
    assert out.tolist() == [[0.0, 3e4, 0.0]]
