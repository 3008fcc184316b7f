"""Expert coverage: the experts are those of a forward, and counted as a set."""

from __future__ import annotations

import pytest
import torch

from kdtree_nb import drafters, ops
from kdtree_nb.bench.acceptance import decode_texts
from kdtree_nb.bench.coverage import coverage, distinct_experts, expert_ids, random_coverage
from kdtree_nb.goldens import load_goldens


def test_distinct_experts():
    ids = [torch.tensor([[0, 1], [1, 2], [0, 1]]), torch.tensor([[4, 4], [4, 4], [5, 5]])]
    assert [distinct_experts(ids, rows) for rows in (1, 2, 3)] == [[2, 1], [3, 1], [3, 2]]


def test_chance():
    assert random_coverage(8, 2, 1) == pytest.approx(2) and random_coverage(16, 4, 2) == pytest.approx(7.0)
    assert random_coverage(8, 2, 1000) == pytest.approx(8)


@pytest.fixture
def seen(monkeypatch):
    """The experts that forwards choose, in order."""
    found, route = [], ops.moe_route

    def watched(*args):
        found.append(route(*args))
        return found[-1]

    monkeypatch.setattr(ops, "moe_route", watched)
    return found


def test_the_experts_are_those_of_a_forward(tiny2, seen):
    tokens = torch.tensor([[5, 7, 9, 11]], device=tiny2.device)
    certain = torch.zeros(1, 3, 1, device=tiny2.device)
    chain = ops.tree_build(certain, tokens[:, 1:, None].contiguous(), tokens[:, 0].clone(), 3)
    start = torch.zeros(1, dtype=torch.int32, device=tiny2.device)
    tiny2.forward(ops.tree_rows(chain, start), chain, tiny2.new_cache(1, 4), start)
    want = [ids for ids, _ in seen]
    got = expert_ids(tiny2, chain, tiny2.new_cache(1, 4), start)
    assert len(got) == len(want) == tiny2.config.num_hidden_layers - tiny2.config.first_k_dense_replace
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_more_rows_wake_more_experts(tiny2):
    prompts = [golden.prompt for golden in load_goldens("tiny2")][:2]
    texts = decode_texts(tiny2, prompts, 16)
    drafter = drafters.SkipGram(sum(texts, []), 331, depth=5, min_count=2)
    found = coverage(tiny2, drafter, prompts, texts, (1, 2, 9), every=4)
    top_k, num_experts = tiny2.config.num_experts_per_tok, tiny2.config.n_routed_experts
    assert found[1] == [top_k] * len(found[1])
    for one, two, nine in zip(*found.values(), strict=True):
        assert one <= two <= nine <= num_experts and nine > one
    with pytest.raises(ValueError, match="expected a drafter of trees of 9 rows, got smaller ones throughout"):
        coverage(tiny2, drafters.Oracle(texts, depth=3, siblings=False), prompts[:1], texts[:1], (1, 9))
