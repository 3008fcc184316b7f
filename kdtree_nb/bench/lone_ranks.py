"""One tensor-parallel rank of several that is there alone: with a stand-in for the others, or just its own part."""

from __future__ import annotations

import torch
from torch import Tensor

from kdtree_nb.model.ranks import OneRank, check_num_ranks
from kdtree_nb.native import ops


class LoneGroup:
    """In place of a `parallel.Group` where only one rank of num_ranks is there: the memory traffic, no link.

    What the others would send is zero, so that sums over ranks are this rank's part. Raises ValueError for a rank that
    is none of 0 … num_ranks - 1.
    """

    def __init__(self, num_ranks: int, device: torch.device, rank: int = 0) -> None:
        _expect_rank("LoneGroup", rank, num_ranks)
        self.num_ranks, self.device, self.rank = num_ranks, device, rank
        self._gathered: dict[tuple[torch.Size, torch.dtype, torch.device], Tensor] = {}

    def all_gather(self, x: Tensor) -> Tensor:
        """[…] -> [num_ranks, …], by a single copy.

        The result is kept for further calls with the same shape and dtype, which write over it: whatever reads it has
        to come before the next such call, in a captured graph as well. `TensorParallel` reads it at once. The first
        call for a shape and dtype makes the zeros, and is not to be captured. They serve in inference mode and outside.
        """
        key = x.shape, x.dtype, x.device
        out = self._gathered.get(key)
        if out is None:
            with torch.inference_mode(False):
                out = self._gathered[key] = x.new_zeros(self.num_ranks, *x.shape)
        out[self.rank].copy_(x)
        return out

    def agree(self, what: str, value: str) -> None:
        """There is nobody to disagree with."""


class LoneShare(OneRank):
    """One of num_ranks ranks, without link and stand-in: what is left of a rank's work between two exchanges.

    Its products sum the segments of its share, in FP32; a sum over ranks is this part alone, rounded and added to the
    residual as if those of the others were zero. A choice over the vocabulary is that of its own part. Raises
    ValueError for a rank that is none of 0 … num_ranks - 1, or unless these are 1, 2, 4 or 8.
    """

    def __init__(self, num_ranks: int, rank: int = 0) -> None:
        check_num_ranks(num_ranks)
        _expect_rank("LoneShare", rank, num_ranks)
        self.num_ranks, self.rank = num_ranks, rank
        self.segments = ops.Segments.of_rank(rank, num_ranks)

    def __repr__(self) -> str:
        return f"LoneShare({self.num_ranks}, {self.rank})"

    def linear(
        self, x: Tensor, packed: ops.PackedLinear, whole_in: int, residual: Tensor, num_rows: Tensor | None
    ) -> Tensor:
        """This rank's part of W x, + residual: x float [T, K'] -> float [T, N]."""
        part = ops.linear_partial(x, packed, whole_in, self.segments, num_rows)
        return ops.add_partials(part[None], residual.dtype, residual, num_rows)

    def moe_experts(
        self, x: Tensor, experts: ops.PackedExperts, expert_id: Tensor, weight: Tensor, whole_widths: tuple[int, int],
        residual: Tensor, num_rows: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """This rank's part of the chosen experts' sum, + residual: float [T, D]."""
        part = ops.moe_experts_partial(x, experts, expert_id, weight, *whole_widths, self.segments, num_rows)
        return ops.add_partials(part[None], residual.dtype, residual, num_rows)


def _expect_rank(who: str, rank: int, num_ranks: int) -> None:
    if not 0 <= rank < num_ranks:
        raise ValueError(f"{who}: expected a rank of 0 … num_ranks - 1, got {rank} of {num_ranks}")
