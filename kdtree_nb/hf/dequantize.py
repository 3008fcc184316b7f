"""Quantised weights back to floats: products in float32, rounded once to the type asked for."""

from __future__ import annotations

import torch
from torch import Tensor

from kdtree_nb.hf.quantization import Fp8Blocks

NIBBLES_PER_WORD = 8


def dequantize_fp8(value: Tensor, scale: Tensor, blocks: Fp8Blocks, dtype: torch.dtype) -> Tensor:
    """value float8_e4m3fn [N, K], scale f32 [ceil(N/rows), ceil(K/columns)] -> dtype [N, K]."""
    num_out, num_in = value.shape
    rows, columns = min(blocks.rows, num_out), min(blocks.columns, num_in)  # a block may be larger than the weight
    wide = scale.float().repeat_interleave(rows, 0)[:num_out].repeat_interleave(columns, 1)[:, :num_in]
    return (value.float() * wide).to(dtype)


def unpack_int4(packed: Tensor, num_in: int) -> Tensor:
    """packed i32 [N, ceil(K/8)], value + 8 in each nibble, the lowest first -> i8 [N, K] of -8 … 7."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    nibbles = (packed.unsqueeze(-1) >> shifts) & 15
    return (nibbles.view(packed.shape[0], -1)[:, :num_in] - 8).to(torch.int8)


def dequantize_int4(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """packed i32 [N, K/8], scale float [N, K/group] -> value · scale in dtype [N, K]."""
    num_in = packed.shape[1] * NIBBLES_PER_WORD
    values = unpack_int4(packed, num_in).float().view(*scale.shape, -1)
    return (values * scale.float().unsqueeze(-1)).view(-1, num_in).to(dtype)
