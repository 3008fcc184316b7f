"""linear on a GPU in a tile shape of one's choice. All give the same bits; which is fastest depends on the rows."""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import torch

from kdtree_nb.errors import KdtreeError
from kdtree_nb.native import load, ops

_UNSUPPORTED = 5
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}


class UnsupportedShapeError(KdtreeError):
    """A tile shape that cannot do these sizes on this device."""


class Shape(NamedTuple):
    """A tile shape: rows and outputs of a block, blocks that share a tile's segments."""

    index: int
    name: str
    num_rows: int
    num_out: int
    cluster: int


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(load().path))
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    library.kdtree_linear_with.argtypes = [*[pointer] * 3, *[size] * 3, ctypes.c_int, ctypes.c_int, pointer]
    library.kdtree_linear_shape.restype = ctypes.c_char_p
    return library


@functools.cache
def shapes(dtype: torch.dtype) -> list[Shape]:
    """All shapes for a dtype."""
    library, found, numbers = _library(), [], (ctypes.c_int * 3)()
    for index in range(library.kdtree_linear_num_shapes(_DTYPES[dtype])):
        name = library.kdtree_linear_shape(_DTYPES[dtype], index, numbers).decode()
        found.append(Shape(index, name, *numbers))
    return found


def linear_with(x: torch.Tensor, packed: ops.PackedLinear, out: torch.Tensor, shape: Shape | None = None) -> None:
    """out = x Wᵀ on the current stream, in this shape, or in the one that `ops.linear` chooses.

    x float [T, K] and out float [T, N], dense, of the weights' dtype. The weights must not be written to by what is
    still running. Raises UnsupportedShapeError for a shape that cannot do it, KdtreeError where the launch fails.
    """
    stream = torch.cuda.current_stream(x.device).cuda_stream
    pointers = x.data_ptr(), packed.data.data_ptr(), out.data_ptr()
    index = -1 if shape is None else shape.index
    status = _library().kdtree_linear_with(
        *pointers, x.shape[0], packed.num_out, packed.num_in, _DTYPES[x.dtype], index, stream
    )
    if status:
        kind = UnsupportedShapeError if status == _UNSUPPORTED else KdtreeError
        raise kind(f"linear_with: {shape}: expected status 0, got {status}")
