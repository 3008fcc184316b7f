"""Fixtures that several test folders share: the two models, loaded once per session."""

from __future__ import annotations

import os

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers have the cores already; threads that wait for a busy core stall each other

MODELS = ("tiny", "tiny2")


@pytest.fixture(scope="session")
def models():
    """(name, dtype) -> Model, loaded on first use and kept for the session."""
    from kdtree_nb import load_model

    loaded = {}

    def get(name: str, dtype: torch.dtype = torch.float32):
        if (name, dtype) not in loaded:
            loaded[name, dtype] = load_model(name, dtype=dtype)
        return loaded[name, dtype]

    return get


@pytest.fixture(params=MODELS)
def model(request, models):
    """tiny, then tiny2, in FP32."""
    return models(request.param)


@pytest.fixture
def tiny2(models):
    """The model with odd sizes, in FP32."""
    return models("tiny2")
