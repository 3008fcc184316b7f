"""Share: which heads, which part of the widths and of the vocabulary one of several ranks holds."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from kdtree_nb.config import ModelConfig, share_of_rank
from kdtree_nb.model.ranks import check_num_ranks


class Range(NamedTuple):
    """Neighbours begin … end - 1 of a dimension."""

    begin: int
    end: int

    def times(self, size: int) -> Range:
        """The range of elements where each neighbour has `size`."""
        return Range(self.begin * size, self.end * size)

    @property
    def length(self) -> int:
        """How many there are."""
        return self.end - self.begin


class Part(NamedTuple):
    """A range of one dimension of a tensor."""

    dim: int
    range: Range


@dataclasses.dataclass(frozen=True)
class Share:
    """What a rank holds. What is reduced is cut at the borders of segments, so shares may differ in size, and a width
    of few segments may leave a rank without any.

    heads:                 of the attention
    dense, routed, shared: of the widths of dense layers, of a routed expert and of the shared one
    vocab:                 rows of the head
    """

    heads: Range
    dense: Range
    routed: Range
    shared: Range
    vocab: Range

    @classmethod
    def of(cls, config: ModelConfig, rank: int, num_ranks: int) -> Share:
        """The share of one of `num_ranks` ranks. Raises ValueError that names the dimension which does not split."""
        check_num_ranks(num_ranks)

        def part(length: int) -> Range:
            return Range(*share_of_rank(length, rank, num_ranks))

        for every in range(num_ranks):
            _check_heads(config, every, num_ranks)
            _check_vocabulary(config, every, num_ranks)
        values, size = part(config.num_attention_heads * config.v_head_dim), config.v_head_dim
        return cls(
            heads=Range(values.begin // size, values.end // size),
            dense=part(config.intermediate_size),
            routed=part(config.moe_intermediate_size),
            shared=part(config.shared_intermediate_size),
            vocab=part(config.vocab_size),
        )


def _check_heads(config: ModelConfig, rank: int, num_ranks: int) -> None:
    H, size = config.num_attention_heads, config.v_head_dim
    begin, end = share_of_rank(H * size, rank, num_ranks)
    if begin % size or end % size or begin == end:
        raise ValueError(
            f"tensor parallel: num_attention_heads: expected whole heads for each of {num_ranks} ranks, got {H} heads "
            f"of v_head_dim {size}, of which rank {rank} would have values {begin} … {end - 1}; use fewer ranks"
        )


def _check_vocabulary(config: ModelConfig, rank: int, num_ranks: int) -> None:
    begin, end = share_of_rank(config.vocab_size, rank, num_ranks)
    if begin == end:
        raise ValueError(
            f"tensor parallel: vocab_size: expected at least 32 tokens for each of {num_ranks} ranks, got "
            f"{config.vocab_size}; use fewer ranks"
        )


def check_group_size(name: str, group_size: int, part: Range) -> None:
    """Raises ValueError where a rank's range of inputs would cut a group of INT4 weights that share a scale."""
    if part.begin % group_size or part.end % group_size:
        raise ValueError(
            f"tensor parallel: {name}: expected whole INT4 groups of {group_size} inputs on every rank, got inputs "
            f"{part.begin} … {part.end - 1}; use fewer ranks"
        )
