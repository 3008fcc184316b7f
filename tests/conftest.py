"""Fixtures that several test folders share: the devices of this machine, and the two models, loaded once."""

from __future__ import annotations

import os

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers have the cores already; threads that wait for a busy core stall each other

MODELS = ("tiny", "tiny2")
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def pytest_collection_modifyitems(items):
    """Skip what is marked `cpu_only(reason)` on other devices."""
    for item in items:
        marker = item.get_closest_marker("cpu_only")
        if marker and hasattr(item, "callspec") and item.callspec.params.get("device", "cpu") != "cpu":
            item.add_marker(pytest.mark.skip(reason=marker.args[0]))


@pytest.fixture(scope="session", params=DEVICES)
def device(request) -> torch.device:
    """Every kind of device that this machine has; tests/cuda/test_devices.py says so where there is no GPU."""
    return torch.device(request.param)


@pytest.fixture(scope="session")
def models(device):
    """(name, dtype) -> Model, loaded on first use and kept for the session."""
    from kdtree_nb import load_model

    loaded = {}

    def get(name: str, dtype: torch.dtype = torch.float32):
        if (name, dtype) not in loaded:
            loaded[name, dtype] = load_model(name, device, dtype)
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
