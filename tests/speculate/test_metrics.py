"""Metrics: each by its definition, on generations made by hand, and on those of an engine against what it recorded."""

from __future__ import annotations

import json
import math

import pytest

from kdtree_nb import Engine, cli, drafters
from kdtree_nb.speculate.metrics import RankCounter, accepted_by_depth, sibling_ranks, summarize
from kdtree_nb.speculate.stats import Generation, GenerationStats

SECONDS = {"prefill": 50.0, "draft": 1.0, "build": 0.25, "verify": 2.0, "accept": 0.5, "compact": 0.25}


def text(accepted, nodes=None, seconds=SECONDS):
    stats = GenerationStats(
        0, list(accepted), nodes or [9] * len(accepted), sum(accepted) + len(accepted), dict(seconds)
    )
    return Generation(list(range(stats.num_tokens)), "length", stats)


def test_tau_pooled_and_by_text():
    found = summarize([text([3, 1]), text([0, 0, 0, 0])])
    assert (found.num_texts, found.num_tokens, found.num_steps) == (2, 10, 6)
    assert found.tau == 10 / 6 and found.tau_mean == (3.0 + 1.0) / 2
    assert found.nodes_per_step == 9 and found.speedup is None and found.accepted_by_rank is None


def test_acceptance_by_depth():
    found = summarize([text([3, 1, 0, 1])])
    assert found.accepted_by_depth == [0.75, 0.25, 0.25]
    assert found.acceptance_by_depth == [0.75, 0.25 / 0.75, 1.0]
    assert accepted_by_depth([]) == [] == accepted_by_depth([0, 0])


def test_seconds_of_texts_decoded_together_count_once():
    call = [text([1, 1]), text([0, 0, 0])]
    found = summarize([call, text([0])])
    assert found.seconds_per_step == {"draft": 2 / 4, "verify": 4 / 4, "bookkeeping": 2 / 4}
    assert found.tokens_per_s == 8 / 8


def test_speedup_and_efficiency():
    ar = [text([0] * 4, seconds={**SECONDS, "verify": 6.0})]  # 4 tokens in 8 seconds
    found = summarize([text([3, 3])], ar)  # 8 tokens in 4 seconds
    assert found.speedup == 4.0 and found.tau == 4.0 and found.efficiency == 1.0


def test_nothing_decoded():
    found = summarize([text([])])
    assert math.isnan(found.tau) and found.accepted_by_depth == []
    assert json.loads(json.dumps(found.to_dict()))["tau"] is None


@pytest.mark.parametrize(("path", "want"), [([], []), ([1], [0]), ([2], [1]), ([1, 3, 4], [0, 0, 0]), ([5, 6], [2, 0])])
def test_rank_among_siblings(path, want):
    assert sibling_ranks([-1, 0, 0, 1, 3, 0, 5, 3], path) == want


def test_ranks_add_up(tiny2, prompts, ar, shuffled_oracle):
    ranks = RankCounter()
    engine = Engine(tiny2, shuffled_oracle([g.tokens for g in ar("tiny2")]), 64)
    calls = [engine.generate_ddtree(prompts["tiny2"], 24, stop_token_ids=(), on_step=ranks)]
    found = summarize(calls, [engine.generate_ar(prompts["tiny2"], 24, stop_token_ids=())], ranks)
    assert sum(ranks.counts.values()) == sum(sum(g.stats.accepted_per_step) for g in calls[0])
    assert sum(found.accepted_by_rank) == pytest.approx(1) and max(ranks.counts) > 0
    assert found.tau > 1 and found.speedup > 0 and found.efficiency == found.speedup / found.tau


def test_an_oracle_is_always_right(tiny2, prompts, ar):
    ranks = RankCounter()
    engine = Engine(tiny2, drafters.Oracle(ar("tiny2")[0].tokens), 16)
    found = summarize([engine.generate_ddtree(prompts["tiny2"][0], 24, stop_token_ids=(), on_step=ranks)], None, ranks)
    assert found.tau == 8.0 == found.tau_mean and found.acceptance_by_depth == [1.0] * 7
    assert found.accepted_by_rank == [1.0]


def test_generate_prints_metrics(capsys):
    command = ["generate", "--model", "tiny2", "--prompt", "ab", "--max-new-tokens", "8", "--metrics"]
    assert cli.main(command) == 2
    assert "--metrics: expected --json beside it" in capsys.readouterr().err
    assert cli.main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    metrics = found["metrics"]
    assert metrics["tau"] == found["tokens_per_step"] and metrics["efficiency"] == metrics["speedup"] / metrics["tau"]
    assert set(metrics["seconds_per_step"]) == {"draft", "verify", "bookkeeping"}
