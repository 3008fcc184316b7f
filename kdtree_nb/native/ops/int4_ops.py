"""INT4 weights: kept as they are stored, packed for the products, or turned into floats. Symbols as in model_ops."""

from __future__ import annotations

from torch import Tensor

from kdtree_nb.native.ops.model_ops import settle
from kdtree_nb.native.ops.namespace import native
from kdtree_nb.native.ops.packed import PackedLinear

INT4_UNIT = 32
"""Inputs of packed INT4 weights that share a scale; larger groups are a multiple of it."""


def int4_linear(weight: Tensor, scale: Tensor) -> PackedLinear:
    """INT4 weights that stay INT4: weight i32 [N, K/8] or [G, N, K/8], value + 8 in each nibble, the lowest first.

    scale: float [N, K/group] or [G, N, K/group]. Products have the bits of those with value · scale in the type of x.
    """
    if weight.dim() == 2:
        weight, scale = weight.unsqueeze(0), scale.unsqueeze(0)
    num_groups, num_out, num_words = weight.shape
    return PackedLinear(weight.contiguous(), num_out, 8 * num_words, num_groups, False, scale.contiguous())


def pack_int4(weight: Tensor, scale: Tensor) -> Tensor:
    """INT4 weights in the order in which products with bf16 rows read them, u8 [G, ceil(N/64), K/32, 4, 288].

    weight i32 [G, N, K/8] as in `int4_linear`, scale bf16 [G, N, K/group]. The same bytes on a CPU and on a GPU, where
    products read them as they are; on a CPU they become floats for every call. The results have the bits of the bf16
    weights that `dequantize_int4` makes. Raises ValueError for groups of other than a multiple of 32 inputs.
    """
    return native.pack_int4(weight, scale)


def packed_int4_linear(weight: Tensor, scale: Tensor) -> PackedLinear:
    """`pack_int4` of weight [N, K/8] or [G, N, K/8] and its scales, for `linear`, `linear_heads`. Waits for the GPU."""
    if weight.dim() == 2:
        weight, scale = weight.unsqueeze(0), scale.unsqueeze(0)
    num_groups, num_out, num_words = weight.shape
    data = native.pack_int4(weight.contiguous(), scale.contiguous())
    return PackedLinear(data, num_out, 8 * num_words, num_groups, settle(data))


def dequantize_int4(
    weight: Tensor, scale: Tensor, bf16: bool, group_id: Tensor | None = None, num_rows: Tensor | None = None
) -> Tensor:
    """INT4 weights to the packed floats that products take: weight i32 [G, N, K/8], scale float [G, N, K/group].

    Values are value · scale in f32, rounded to bf16 if asked. group_id i32 [T, k] names the groups that are wanted;
    what it does not name is undefined. Raises ValueError for scales that do not divide the inputs into groups.
    """
    return native.dequantize_int4(weight, scale, bf16, group_id, num_rows)
