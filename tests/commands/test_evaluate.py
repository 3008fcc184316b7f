"""evaluate: the figures of the harness as a table and as JSON, on prompts from every source."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kdtree_nb import cli, viz
from kdtree_nb.bench import budget_groups, prompt_sets
from kdtree_nb.train.nano.tokenizer import EOS
from kdtree_nb.train.nano.tokens import TokenCorpus

OWN = ["evaluate", "--max-new-tokens", "12", "--budgets", "2", "4"]
QUICK = [*OWN, "--num-prompts", "2"]


def test_a_table(capsys):
    assert cli.main([*QUICK, "--check", "chain", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "code: 2 texts of 12 tokens, exact: {'chain': 2, '4': 2}"
    assert [line.split()[0] for line in lines[2:]] == ["chain", "2", "4", "prompt"]


def test_everything_as_json(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(budget_groups, "COVERAGE_ROWS", (1, 3))
    monkeypatch.setattr("kdtree_nb.commands.common.make_drafter", lambda name: budget_groups.source_skip_gram())
    out = tmp_path / "found.json"
    more = ["--prompts", "own", "--times", "1", "--coverage", "--json", "--out", str(out)]
    assert cli.main([*OWN, *more]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(out.read_text()) and found["sets"].keys() == {"code", "repetitive"}
    groups = ["acceptance", "budget_sweep", "budget_sweep_tau", "expert_coverage"]
    assert sorted({m["name"].partition("/")[0] for m in found["results"]}) == groups
    assert {m["params"]["rows"] for m in found["results"] if "rows" in m["params"]} == {1, 3}
    assert found["sources"]["code"]["file"] == "prompts.json" and "--num-prompts" not in found["command"]
    record = viz.load_record(out)
    tau = record.find("acceptance/SkipGram", set="code", budget=4)
    assert [tau.median] == [e["tau"] for e in found["sets"]["code"]["budgets"] if e["budget"] == 4]
    assert record.find("acceptance/prompt lookup", set="code", budget="chain").params["num_tokens"] == 12
    assert record.command.startswith("kdtree-nb evaluate --model tiny") or "_NUM_THREADS=" in record.command


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--drafter", "none"], "--drafter: expected a drafter, got none"),
        (["--prompts", "packed"], "--corpus: expected it with --prompts packed"),
        (["--corpus", "tokens.pack"], "--corpus: expected it with --prompts packed"),
        (["--check", "tree"], "--check: expected some of chain, 2, 4 (see --budgets), got 'tree'"),
        (["--check", "chain", "7"], "--check: expected some of chain, 2, 4 (see --budgets), got '7'"),
        (["--prompts", "own"], "--num-prompts: expected none with --prompts own, which takes all, got 2"),
        (["--num-prompts", "1000000000"], "prompts: expected at most"),
        (["--out", "/dev/null/x.json"], "--out: expected a folder to write to, got /dev/null (File exists)"),
        (["--num-prompts", "0"], "--num-prompts: expected at least 1, got 0"),
        (["--max-new-tokens", "0"], "--max-new-tokens: expected at least 1, got 0"),
        (["--times", "-1"], "--times: expected at least 0, got -1"),
        (["--budgets", "0"], "--budgets: expected different numbers of 1 … 1023, got [0]"),
        (["--budgets", "4", "4"], "--budgets: expected different numbers of 1 … 1023, got [4, 4]"),
    ],
)
def test_bad_options(capsys, options, error):
    assert cli.main([*QUICK, *options]) == 2
    assert error in capsys.readouterr().err


def test_prompts_of_a_packed_corpus_lie_inside_documents():
    rng = np.random.default_rng(0)
    stream = rng.integers(2, 400, 5000).astype(np.int16)
    stream[::97] = EOS
    corpus = TokenCorpus({"code": stream}, {"streams": {"code": {"sha256": "x"}}})
    found = prompt_sets.packed_prompts(corpus, "code", 20, (10, 30))
    assert found == prompt_sets.packed_prompts(corpus, "code", 20, (10, 30)) and found.source["seed"] == 0
    text = ",".join(map(str, stream.tolist()))
    for prompt in found.prompts:
        assert EOS not in prompt and 10 <= len(prompt) <= 30 and ",".join(map(str, prompt)) in text
    with pytest.raises(ValueError, match="expected 20 places in 5000 tokens, found 0"):
        prompt_sets.packed_prompts(corpus, "code", 20, (200, 300))
