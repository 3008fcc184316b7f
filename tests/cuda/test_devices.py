"""Whether a GPU takes part in this run. Without one the `device` fixture knows the CPU alone: the summary says so."""

from __future__ import annotations

import pytest
import torch

from kdtree_nb.native import build


def test_a_gpu_takes_part():
    if not torch.cuda.is_available():
        reason = "torch is a CPU build" if not torch.version.cuda else "no GPU is visible"
        pytest.skip(f"{reason}: the tests of the kernels, the model and the engine ran on the CPU only")
    assert build.load().no_cuda == ""
