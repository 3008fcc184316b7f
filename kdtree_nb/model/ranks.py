"""Ranks: who computes a model. One process alone, or several of which each holds a share (kdtree_nb.parallel)."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from kdtree_nb.native import ops


class SampleBy(NamedTuple):
    """What rows are sampled by: stream and position i32 [T] as in Rows, per stream the parameters of `ops.sample`."""

    stream: Tensor
    position: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seed: Tensor
    max_kept: int
    """The most tokens that top_k and top_p keep of any stream; 0 where every stream keeps all."""


class Ranks(Protocol):
    """What depends on how many ranks there are. All ranks call the same in the same order, and get the same bits as one
    rank alone. num_rows: the rows in use, i32 [1] or None; of the others nothing is defined."""

    rank: int
    num_ranks: int
    only_ops: bool
    """Whether it calls nothing but kdtree_nb.ops, which is what a Capture records."""

    def linear(
        self, x: Tensor, packed: ops.PackedLinear, whole_in: int, residual: Tensor, num_rows: Tensor | None
    ) -> Tensor:
        """W x + residual, where this rank has some of the whole_in inputs: x float [T, K'] -> float [T, N]."""
        ...

    def moe_experts(
        self, x: Tensor, experts: ops.PackedExperts, expert_id: Tensor, weight: Tensor, whole_widths: tuple[int, int],
        residual: Tensor, num_rows: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """`ops.moe_experts`, where this rank has a part of every expert's width. whole_widths: routed and shared."""
        ...

    def argmax(self, logits: Tensor, vocab_size: int, num_rows: Tensor | None) -> Tensor:
        """`ops.argmax` over the whole vocabulary, of which this rank has a part: f32 [T, V'] -> i64 [T]."""
        ...

    def sample(self, logits: Tensor, vocab_size: int, by: SampleBy, num_rows: Tensor | None) -> Tensor:
        """`ops.sample` over the whole vocabulary: f32 [T, V'] -> i64 [T]."""
        ...

    def draft_topk(self, logits: Tensor, vocab_size: int, num_candidates: int) -> tuple[Tensor, Tensor]:
        """`ops.draft_topk` of logits [B, L, V] or, from the model's head, of this rank's part [B, L, V']."""
        ...

    def all_logits(self, logits: Tensor, vocab_size: int) -> Tensor:
        """The logits of the whole vocabulary: f32 [T, V'] -> f32 [T, V]."""
        ...

    def agree(self, what: str, value: str) -> None:
        """Raises RankError that names `what` where `value` is another on some rank."""
        ...


class OneRank:
    """A process that computes everything itself."""

    rank, num_ranks, only_ops = 0, 1, True

    def __repr__(self) -> str:
        return "ONE_RANK"

    def linear(
        self, x: Tensor, packed: ops.PackedLinear, whole_in: int, residual: Tensor, num_rows: Tensor | None
    ) -> Tensor:
        """`ops.linear`."""
        return ops.linear(x, packed, residual, num_rows=num_rows)

    def moe_experts(
        self, x: Tensor, experts: ops.PackedExperts, expert_id: Tensor, weight: Tensor, whole_widths: tuple[int, int],
        residual: Tensor, num_rows: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """`ops.moe_experts`."""
        return ops.moe_experts(x, experts, expert_id, weight, residual, num_rows)

    def argmax(self, logits: Tensor, vocab_size: int, num_rows: Tensor | None) -> Tensor:
        """`ops.argmax`."""
        return ops.argmax(logits, num_rows)

    def sample(self, logits: Tensor, vocab_size: int, by: SampleBy, num_rows: Tensor | None) -> Tensor:
        """`ops.sample`."""
        return ops.sample(logits, *by[:-1], num_rows)

    def draft_topk(self, logits: Tensor, vocab_size: int, num_candidates: int) -> tuple[Tensor, Tensor]:
        """`ops.draft_topk`."""
        return ops.draft_topk(logits, num_candidates)

    def all_logits(self, logits: Tensor, vocab_size: int) -> Tensor:
        """The logits themselves."""
        return logits

    def agree(self, what: str, value: str) -> None:
        """There is nobody to disagree with."""


ONE_RANK = OneRank()


def check_num_ranks(num_ranks: int) -> None:
    """Raises ValueError unless a model can be split over so many."""
    if isinstance(num_ranks, bool) or not isinstance(num_ranks, int) or num_ranks not in (1, 2, 4, 8):
        raise ValueError(
            "tensor parallel: world size: expected 1, 2, 4 or 8 ranks, as a reduction has 8 segments, got "
            f"{num_ranks!r}"
        )
