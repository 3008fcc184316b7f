"""linear in a tile shape of one's choice: the C functions compile against linear.cuh, and all shapes give the same."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

import pytest
import torch

from kdtree_nb import ops
from kdtree_nb.bench.linear_shapes import UnsupportedShapeError, linear_with, shapes
from kdtree_nb.native import toolchain

BIND = Path(__file__).resolve().parents[2] / "kernels" / "bind"
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none")


def test_the_c_functions_compile():
    compiler = toolchain.find_compiler().split()
    command = [*compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", str(BIND / "cuda_shapes.cpp")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@needs_gpu
@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_shape_gives_the_same_bits(dtype):
    weight = torch.randn(80, 300, device="cuda").to(dtype)
    x = torch.randn(19, 300, device="cuda").to(dtype)
    packed = ops.pack_linear(weight)
    want = ops.linear(x, packed)
    num_usable = 0
    for shape in (None, *shapes(dtype)):
        out = torch.full_like(want, torch.nan)
        torch.cuda.synchronize()
        with contextlib.suppress(UnsupportedShapeError):
            linear_with(x, packed, out, shape)
            assert torch.equal(out, want), shape
            num_usable += 1
    assert num_usable >= 3


@needs_gpu
@pytest.mark.cuda
def test_a_shape_that_is_not_there_is_refused():
    packed = ops.pack_linear(torch.randn(16, 32, device="cuda"))
    x, out = torch.randn(1, 32, device="cuda"), torch.empty(1, 16, device="cuda")
    with pytest.raises(UnsupportedShapeError, match="expected status 0"):
        linear_with(x, packed, out, shapes(torch.float32)[0]._replace(index=99))
