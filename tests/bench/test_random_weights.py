"""Random weights: the same whole however it is split, and a rank makes its pieces alone."""

from __future__ import annotations

import pytest
import torch

from kdtree_nb.bench import k26_sizes
from kdtree_nb.bench.random_weights import RandomSource
from kdtree_nb.hf.config import read_config
from kdtree_nb.model.share import Part, Range

EXPERT = "model.layers.1.mlp.experts.3.down_proj.weight"


@pytest.fixture(scope="module")
def config():
    return k26_sizes.small(read_config(k26_sizes.CONFIG))


def source(config, device, seed=0):
    return RandomSource(config, device, torch.bfloat16, seed)


def split(length, num_ranks):
    return [Range(length * r // num_ranks, length * (r + 1) // num_ranks) for r in range(num_ranks)]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_parts_put_together_are_the_whole(config, device, dim, num_ranks):
    shape = (96, 64)
    whole = source(config, device)("w", *shape, part=Part(dim, Range(0, shape[dim])))
    parts = [source(config, device)("w", *shape, part=Part(dim, r)) for r in split(shape[dim], num_ranks)]
    assert torch.equal(torch.cat(parts, dim), whole)
    assert abs(float(whole.float().std()) * 8 - 1) < 0.1  # the size of what it is applied to stays


@pytest.mark.parametrize("dim", [0, 1])
def test_parts_of_int4_put_together_are_the_whole(config, device, dim):
    whole = source(config, device).int4(EXPERT, 64, 512, part=Part(dim, Range(0, (64, 512)[dim])))
    parts = [source(config, device).int4(EXPERT, 64, 512, part=Part(dim, r)) for r in split((64, 512)[dim], 4)]
    for kind in (0, 1):
        assert torch.equal(torch.cat([part[kind] for part in parts], dim), whole[kind])
    assert whole[0].shape == (64, 64) and whole[1].shape == (64, 16)
    nibbles = torch.stack([(whole[0] >> (4 * i)) & 15 for i in range(8)])
    assert nibbles.flatten().bincount(minlength=16).min() > 1500 and whole[1].min() > 0


def test_a_rank_makes_its_pieces_alone(config, device, monkeypatch):
    made = []
    piece = RandomSource._piece
    monkeypatch.setattr(RandomSource, "_piece", lambda self, *a: made.append(a[1]) or piece(self, *a))
    source(config, device)("w", 64, 32, part=Part(0, Range(16, 32)))
    assert made == [2, 3]


def test_names_and_seeds_differ_and_nothing_depends_on_the_order(config, device):
    one, two = source(config, device), source(config, device)
    first, second = one("a", 32, 32), one("b", 32, 32)
    assert torch.equal(two("b", 32, 32), second) and torch.equal(two("a", 32, 32), first)
    assert not torch.equal(first, second) and not torch.equal(first, source(config, device, 1)("a", 32, 32))
    assert source(config, device)("a", 32, 32, part=Part(0, Range(8, 8))).shape == (0, 32)
