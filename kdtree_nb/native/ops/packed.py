"""Weights as the products take them: packed for a device, or INT4, which a product turns into packed floats first."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kdtree_nb.native.ops.namespace import native


class PackedLinear(NamedTuple):
    """Weights of one matrix per group, packed by `pack_linear`. The layout belongs to the device; zeros past N and K.

    data:    float, on a CPU [G, ceil(N/16), K, 16], on a GPU [G, ceil(N/16), ceil(K/32), 512]; or INT4, see
             `int4_linear` and `packed_int4_linear`. Never written to again.
    settled: a GPU had written `data` before anyone could use it. Products then read it while the kernel before them
             still runs.
    scale:   of INT4 weights
    """

    data: Tensor
    num_out: int
    num_in: int
    num_groups: int
    settled: bool = False
    scale: Tensor | None = None


class PackedExperts(NamedTuple):
    """Weights of E routed experts and at most one shared expert, packed by `pack_experts`.

    gate_up, down: data of PackedLinear for E matrices [2I, D] and [D, I]
    shared_gate_up, shared_down: for one matrix [2S, D] and [D, S], or None
    width, shared_width: I and S; S is 0 without a shared expert
    gate_up_scale, down_scale: where the routed experts are INT4, i32 [E, 2I, D/8] and [E, D, I/8]: their scales. What
    `pack_int4` has made of them holds its scales itself.
    """

    gate_up: Tensor
    down: Tensor
    shared_gate_up: Tensor | None
    shared_down: Tensor | None
    width: int
    shared_width: int
    gate_up_scale: Tensor | None = None
    down_scale: Tensor | None = None


def floats_of(packed: PackedLinear, dtype: torch.dtype) -> Tensor:
    """The weights as a product with inputs of `dtype` takes them."""
    if packed.scale is None:
        return packed.data
    return native.dequantize_int4(packed.data, packed.scale, dtype == torch.bfloat16)


def dequantized(
    experts: PackedExperts, dtype: torch.dtype, expert_id: Tensor, num_rows: Tensor | None
) -> tuple[Tensor, Tensor]:
    """gate_up and down of the chosen experts as products with inputs of `dtype` take them."""
    gate_up, down, up_scale, down_scale = experts.gate_up, experts.down, experts.gate_up_scale, experts.down_scale
    if up_scale is None:
        return gate_up, down
    if experts.width == 0:  # a rank without a part of them
        num_experts, dim = down.shape[:2]
        empty = expert_id.new_empty((num_experts, 0, dim), dtype=dtype)
        return native.pack_linear(empty), native.pack_linear(empty.transpose(1, 2).contiguous())
    chosen = dtype == torch.bfloat16, expert_id, num_rows
    return native.dequantize_int4(gate_up, up_scale, *chosen), native.dequantize_int4(down, down_scale, *chosen)


def expect_inputs(name: str, x: Tensor, packed: PackedLinear) -> None:
    """Raises ValueError unless the weights are for the K inputs of x [..., K]: where K is padded to blocks of 32, the
    binding cannot tell one K from the next."""
    if x.shape[-1] != packed.num_in:
        raise ValueError(f"{name}: packed: expected shape for K = {x.shape[-1]} inputs, got one for {packed.num_in}")
