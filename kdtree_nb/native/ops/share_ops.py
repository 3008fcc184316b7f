"""Operations of one rank of several: sums of some of the 8 segments of a reduction, and what adds those of all ranks.

A rank holds whole segments, neighbours whose sum is a node of the tree over all 8 (see kernels/segments.h): so the
ranks' sums, added in pairs, are the sum of one rank that has them all, bit by bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kdtree_nb.config import segments_of_rank
from kdtree_nb.native.ops.namespace import native
from kdtree_nb.native.ops.packed import PackedExperts, PackedLinear, dequantized, expect_inputs, floats_of


class Segments(NamedTuple):
    """The segments that a rank sums: `count` of the 8, from `first` on. count is 1, 2, 4 or 8, and divides first."""

    first: int
    count: int

    @classmethod
    def of_rank(cls, rank: int, num_ranks: int) -> Segments:
        """Those of one of 1, 2, 4 or 8 ranks."""
        return cls(*segments_of_rank(rank, num_ranks))


def linear_partial(
    x: Tensor, packed: PackedLinear, whole_in: int, segments: Segments, num_rows: Tensor | None = None
) -> Tensor:  # fmt: skip
    """A rank's part of W x: x float [T, K'] and packed of [N, K'] hold the inputs of its segments -> f32 [T, N].

    whole_in: K, the inputs of all ranks. Raises ValueError where the segments of K do not have K' inputs.
    """
    if x.is_cuda:
        expect_inputs("linear_partial", x, packed)
    data = floats_of(packed, x.dtype)
    return native.linear(x, data, packed.num_out, None, True, num_rows, packed.settled, whole_in, *segments)


def moe_experts_partial(
    x: Tensor, experts: PackedExperts, expert_id: Tensor, weight: Tensor, whole_width: int, whole_shared_width: int,
    segments: Segments, num_rows: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """A rank's part of `moe_experts` before the rounding: f32 [T, D]. `experts` has the widths of its segments.

    whole_width, whole_shared_width: the widths of all ranks
    """
    gate_up, down = dequantized(experts, x.dtype, expert_id, num_rows)
    return native.moe_experts(
        x, gate_up, down, experts.shared_gate_up, experts.shared_down, expert_id, weight, experts.width,
        experts.shared_width, None, num_rows, whole_width, whole_shared_width, *segments,
    )  # fmt: skip


def add_partials(
    partials: Tensor, dtype: torch.dtype, residual: Tensor | None = None, num_rows: Tensor | None = None
) -> Tensor:
    """The sum of the ranks' parts f32 [P, T, N], in pairs, rounded once to `dtype` (+ residual) -> float [T, N].

    residual float [T, N] is added with a rounding of its own. Raises ValueError unless P is 1, 2, 4 or 8.
    """
    return native.add_partials(partials, residual, dtype == torch.bfloat16, num_rows)


@native.fake
def add_partials_fake(
    partials: Tensor, residual: Tensor | None, bf16: bool, num_rows: Tensor | None = None
) -> Tensor:  # fmt: skip
    return partials.new_empty(partials.shape[1:], dtype=torch.bfloat16 if bf16 else torch.float32)
