"""Figures are drawn without a display and closed after each test."""

from __future__ import annotations

import matplotlib
import pytest

matplotlib.use("Agg")


@pytest.fixture(autouse=True)
def closed_figures():
    """Close what a test has drawn."""
    yield
    matplotlib.pyplot.close("all")


@pytest.fixture
def tree():
    """Two trees: root 0 with children 1, 2; 3 below 1; 4 below 3; and a root alone."""
    import torch

    from kdtree_nb.tree import DraftTree

    filler = [-1, -1, -1, -1]
    return DraftTree(
        token=torch.tensor([[65, 66, 10, 68, 32], [70, *filler]]),
        parent=torch.tensor([[-1, 0, 0, 1, 3], [-1, *filler]], dtype=torch.int32),
        depth=torch.tensor([[0, 1, 1, 2, 3], [0, *filler]], dtype=torch.int32),
        log_prob=torch.tensor([[0.0, -0.5, -1.0, -1.5, -2.0], [0.0] + [-torch.inf] * 4], dtype=torch.float64),
        ancestor_bits=torch.tensor([[[1], [3], [5], [11], [27]], [[1], [0], [0], [0], [0]]]),
        num_nodes=torch.tensor([5, 1], dtype=torch.int32),
    )
