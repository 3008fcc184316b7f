"""Benchmarks of linear on a GPU at the sizes of Kimi K2: against cuBLAS, and against freedom to choose by the rows."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import torch

from kdtree_nb.bench.lab import Calls, Lab
from kdtree_nb.bench.linear_shapes import Shape, UnsupportedShapeError, linear_with, shapes
from kdtree_nb.bench.runner import Effort, Measurement, require
from kdtree_nb.native import ops

SHAPES = ((7168, 2048), (2048, 7168), (7168, 1536), (8192, 7168), (7168, 18432), (18432, 7168))
"""(K, N) of the linear layers."""

SHAPES_F32 = ((7168, 2048), (2048, 7168))
ROWS = (1, 4, 8, 16, 17, 32, 64, 512, 2048)
ROWS_F32 = (1, 16, 64, 512)
FREE_ROWS = (1, 4, 8, 16, 17, 32, 64)
ROTATED_BYTES = 330_000_000
"""Weights in turn: more than any cache holds."""

TOLERANCES = {torch.float32: 2e-4, torch.bfloat16: 2e-2}
"""Largest difference of two products over the largest value."""


class Layer:
    """Copies of one layer's weights: plain float [N, K], and packed."""

    def __init__(self, lab: Lab, K: int, N: int, dtype: torch.dtype) -> None:
        self.lab, self.K, self.N, self.dtype = lab, K, N, dtype
        num_copies = max(2, math.ceil(ROTATED_BYTES / (K * N * dtype.itemsize)))
        self.weights = [lab.randn(N, K, dtype=dtype).mul_(K**-0.5) for _ in range(num_copies)]
        self.packed = [ops.pack_linear(w) for w in self.weights]

    def params(self, M: int) -> dict[str, object]:
        """Of a measurement with M rows."""
        num_bytes = (self.N * self.K + M * (self.K + self.N)) * self.dtype.itemsize
        return {"M": M, "N": self.N, "K": self.K} | self.lab.work(num_bytes, 2 * M * self.N * self.K, self.dtype)

    def torch_calls(self, x: torch.Tensor) -> Calls:
        """cuBLAS by way of torch, into a ready result."""
        out = x.new_empty(x.shape[0], self.N)
        return [lambda w=w: torch.mm(x, w.t(), out=out) for w in self.weights]

    def native_calls(self, x: torch.Tensor) -> Calls:
        """The operation."""
        return [lambda p=p: ops.linear(x, p) for p in self.packed]

    def check(self, x: torch.Tensor) -> None:
        """Both give the same product, to rounding."""
        want, got = torch.mm(x, self.weights[0].t()), ops.linear(x, self.packed[0])
        tolerance = TOLERANCES[self.dtype]
        agree = (want - got).abs().max() <= tolerance * want.abs().max()
        require(bool(agree), "linear", f"the product to {tolerance} of the largest value")


def layers(lab: Lab) -> list[tuple[Callable[[], Layer], tuple[int, ...]]]:
    """Makers of the layers to measure, and the numbers of rows. One layer's weights are in memory at a time."""
    plan = [(K, N, torch.bfloat16, ROWS) for K, N in SHAPES] + [(K, N, torch.float32, ROWS_F32) for K, N in SHAPES_F32]
    return [(lambda K=K, N=N, d=dtype: Layer(lab, K, N, d), rows) for K, N, dtype, rows in plan]


def linear(lab: Lab, effort: Effort) -> list[Measurement]:
    """x Wᵀ for M rows by graph replays over weights in turn: cuBLAS through torch, and the native operation."""
    results = []
    for make, rows in layers(lab):
        layer = make()
        for M in effort.some(rows):
            x = lab.randn(M, layer.K, dtype=layer.dtype)
            layer.check(x)
            contenders = {"torch": layer.torch_calls(x), "native": layer.native_calls(x)}
            results += lab.compete("linear", contenders, effort, layer.params(M))
    return results


def invariance_cost(lab: Lab, effort: Effort) -> list[Measurement]:
    """What one order of additions costs. BF16 linear as the engine calls it, against the fastest of all its tile
    shapes for that number of rows, and against the fastest of several ways to ask cuBLAS."""
    results = []
    for K, N in SHAPES:
        layer = Layer(lab, K, N, torch.bfloat16)
        transposed = [w.t().contiguous() for w in layer.weights]
        for M in effort.some(FREE_ROWS):
            x = lab.randn(M, K, dtype=layer.dtype)
            contenders = {
                "invariant": _with(layer, x, None),
                "best shape": _fastest(lab, [_with(layer, x, s) for s in _usable(layer, x)]),
                "best cuBLAS": _fastest(lab, _ways(layer, transposed, x)),
            }
            results += lab.compete("invariance_cost", contenders, effort, layer.params(M))
    return results


def _with(layer: Layer, x: torch.Tensor, shape: Shape | None) -> Calls:
    out = x.new_empty(x.shape[0], layer.N)
    return [lambda p=p: linear_with(x, p, out, shape) for p in layer.packed]


def _usable(layer: Layer, x: torch.Tensor) -> list[Shape]:
    """Shapes that can do it, with tiles that are neither mostly empty nor many."""
    M, found = x.shape[0], []
    for shape in shapes(layer.dtype):
        if (shape.num_rows < 4 * M or shape.num_rows <= 16) and shape.num_rows * 4 > M:
            with contextlib.suppress(UnsupportedShapeError):
                _with(layer, x, shape)[0]()
                found.append(shape)
    return found


def _ways(layer: Layer, transposed: list[torch.Tensor], x: torch.Tensor) -> list[Calls]:
    """cuBLAS on weights [N, K], on weights [K, N], and on rows padded with zeros to a multiple of 16."""
    out = x.new_empty(x.shape[0], layer.N)
    ways = [layer.torch_calls(x), [lambda w=w: torch.mm(x, w, out=out) for w in transposed]]
    if x.shape[0] % 16:
        padded = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % 16))
        ways.append(layer.torch_calls(padded))
    return ways


def _fastest(lab: Lab, ways: list[Calls]) -> Calls:
    """The calls that take the least time, by three samples each."""
    times = []
    for calls in ways:
        sample = lab.sample(calls)
        times.append(min(sample() for _ in range(3)))
    return ways[times.index(min(times))]
