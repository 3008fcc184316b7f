"""Which parts of a model the ranks hold, and which dimensions do not split."""

from __future__ import annotations

import dataclasses

import pytest

from kdtree_nb.config import ModelConfig, segment_bounds, share_of_rank
from kdtree_nb.model.share import Range, Share, check_group_size
from kdtree_nb.tiny2 import tiny2_config
from tests.parallel.programs import config_of

FIELDS = ("heads", "dense", "routed", "shared", "vocab")


def sizes(config: ModelConfig) -> dict[str, int]:
    return {
        "heads": config.num_attention_heads, "dense": config.intermediate_size, "routed": config.moe_intermediate_size,
        "shared": config.shared_intermediate_size, "vocab": config.vocab_size,
    }  # fmt: skip


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["tiny8", "nano"])
def test_shares_are_neighbours_that_cover_everything(name, num_ranks):
    config = config_of(name)
    shares = [Share.of(config, rank, num_ranks) for rank in range(num_ranks)]
    for field in FIELDS:
        parts = [getattr(share, field) for share in shares]
        assert parts[0].begin == 0 and parts[-1].end == sizes(config)[field]
        assert all(a.end == b.begin for a, b in zip(parts, parts[1:], strict=False))


def test_a_share_is_whole_segments():
    for length in (1, 31, 32, 33, 96, 264, 331, 1408, 10944, 18432):
        bounds = segment_bounds(length)
        for num_ranks in (2, 4, 8):
            for rank in range(num_ranks):
                begin, end = share_of_rank(length, rank, num_ranks)
                assert (begin, end) == (bounds[rank * 8 // num_ranks], bounds[(rank + 1) * 8 // num_ranks])


def test_dimensions_that_do_not_split_are_named():
    config = config_of("tiny8")
    with pytest.raises(ValueError, match="num_attention_heads: expected whole heads for each of 2 ranks, got 6 heads"):
        Share.of(tiny2_config(), 0, 2)
    with pytest.raises(ValueError, match="num_attention_heads: expected whole heads for each of 8 ranks, got 4 heads"):
        Share.of(dataclasses.replace(config, num_attention_heads=4), 5, 8)
    with pytest.raises(ValueError, match="vocab_size: expected at least 32 tokens for each of 8 ranks, got 200"):
        Share.of(dataclasses.replace(config, vocab_size=200), 0, 8)
    for num_ranks in (3, 0, 16):
        with pytest.raises(ValueError, match=f"world size: expected 1, 2, 4 or 8 ranks.*got {num_ranks}"):
            Share.of(config, 0, num_ranks)
    check_group_size("down", 32, Range(32, 96))
    with pytest.raises(ValueError, match="down: expected whole INT4 groups of 64 inputs.*got inputs 32 … 95"):
        check_group_size("down", 64, Range(32, 96))


@pytest.mark.parametrize(("heads", "v_head_dim"), [(16, 128), (64, 128), (128, 128)])
def test_the_public_models_split_over_8(heads, v_head_dim):
    config = dataclasses.replace(config_of("nano"), num_attention_heads=heads, v_head_dim=v_head_dim)
    assert [Share.of(config, rank, 8).heads.length for rank in range(8)] == [heads // 8] * 8
