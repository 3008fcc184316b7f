"""What a step fetches and computes, and what a rank has of it, against counts by hand and over ranks."""

from __future__ import annotations

import dataclasses

import pytest

from kdtree_nb.bench.k26 import CONFIG, small, with_layers
from kdtree_nb.hf import read_config
from kdtree_nb.hf.step_work import expected_experts, rank_config, step_work


@pytest.fixture(scope="module")
def k26():
    return read_config(CONFIG)


def test_an_ar_step_of_k26_by_hand(k26):
    work = step_work(k26, 1, 1024, 8)
    D, expert = 7168, 3 * 7168 * 2048
    attention = D * (1536 + 576) + 1536 * 64 * 192 + 512 * 64 * 256 + 64 * 128 * D
    assert work.bytes_by_part["routed experts"] == pytest.approx(60 * 8 * expert * (0.5 + 2 / 32))
    assert work.bytes_by_part["shared experts"] == 60 * expert * 2
    assert work.bytes_by_part["attention"] == 61 * attention * 2
    assert work.bytes_by_part["dense feed-forward"] == 3 * D * 18432 * 2
    assert work.bytes_by_part["head"] == 163840 * D * 2
    assert work.bytes_by_part["embedding"] == pytest.approx(D * 2)
    assert work.bytes_by_part["cache"] == 61 * 1025 * 576 * 2
    weights = 61 * attention + 3 * D * 18432 + 60 * (9 * expert + 384 * D) + 163840 * D
    assert work.flops == pytest.approx(2 * (weights + 61 * 1025 * 64 * (576 + 512)), rel=1e-3)


def test_ranks_together_do_the_work_of_all(k26):
    """Latent projections, router and cache are whole on each rank; everything else is divided."""
    whole, rank = step_work(k26, 4, 8192, 30.0), step_work(rank_config(k26, 8), 4, 8192, 30.0)
    for part in ("routed experts", "shared experts", "dense feed-forward", "head"):
        assert 8 * rank.bytes_by_part[part] == pytest.approx(whole.bytes_by_part[part])
    for part in ("router", "cache", "norms"):
        assert rank.bytes_by_part[part] == whole.bytes_by_part[part]
    latent = 61 * 7168 * (1536 + 576) * 2
    divided = whole.bytes_by_part["attention"] - latent
    assert rank.bytes_by_part["attention"] == pytest.approx(latent + divided / 8)


def test_random_routing(k26):
    assert expected_experts(384, 8, 1) == pytest.approx(8)
    assert expected_experts(384, 8, 10_000) == pytest.approx(384)
    assert step_work(k26, 16, 64) == step_work(k26, 16, 64, expected_experts(384, 8, 16))
    more = [step_work(k26, n, 64).num_bytes for n in (1, 4, 16, 64)]
    assert more == sorted(more) and more[0] < more[-1] / 10


def test_layers_without_experts_wake_none(k26):
    dense = with_layers(k26, 1)
    work = step_work(dense, 4, 64)
    assert work == step_work(dense, 4, 64, 0.0) and "routed experts" not in work.bytes_by_part
    assert work.bytes_by_part["dense feed-forward"] == step_work(k26, 4, 64).bytes_by_part["dense feed-forward"]


def test_the_floor_is_the_longer_of_both(k26):
    work = step_work(k26, 1, 1024)
    assert work.floor_s(1e12, 1e18) == work.num_bytes / 1e12
    assert work.floor_s(1e18, 1e12) == work.flops / 1e12


def test_a_split_that_cuts_something_is_refused(k26):
    for num_ranks, field in ((3, "num_attention_heads"), (0, "num_attention_heads"), (128, "num_attention_heads")):
        with pytest.raises(ValueError, match=f"rank_config: {field}: expected a multiple"):
            rank_config(k26, num_ranks)
    narrow = dataclasses.replace(small(k26).model, moe_intermediate_size=128)
    with pytest.raises(ValueError, match="moe_intermediate_size: expected a multiple of 32 for each of 8 ranks"):
        rank_config(dataclasses.replace(small(k26), model=narrow), 8)
