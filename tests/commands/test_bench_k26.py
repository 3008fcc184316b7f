"""bench k26 on the command line: a small run, its record, and refusals."""

from __future__ import annotations

import shlex

from kdtree_nb import cli, viz

SMALL = ["bench", "k26", "--device", "cpu", "--small", "--layers", "2", "--quick", "--rows", "1", "3", "--prefix", "32"]


def test_a_small_run_prints_and_writes_where_told(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(viz.records, "BENCHMARKS", None)  # no test writes there
    out = tmp_path / "k26.json"
    assert cli.main([*SMALL, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "k26_step" in printed and "projection=True" in printed and "changed_rows=0" in printed
    record = viz.load_record(out)
    assert record.command.endswith(shlex.join(["kdtree-nb", "bench", "k26", "--device", "cpu", "--tp-rank-of", "8",
                                               "--layers", "2", "--rows", "1", "3", "--prefix", "32", "--small",
                                               "--quick"]))  # fmt: skip
    assert [r.params["rows"] for r in record.results if r.name == "k26_step/captured"] == [1, 3]
    assert record.find("k26_step/captured", rows=1).params["hidden"] == 256
    assert cli.main([*SMALL, "--rows", "1"]) == 0 and "record:" not in capsys.readouterr().out


def test_refusals(capsys):
    assert cli.main([*SMALL, "--tp-rank-of", "3"]) == 2
    assert "num_attention_heads: expected a multiple" in capsys.readouterr().err
    assert cli.main([*SMALL, "--layers", "62"]) == 2
    assert "--layers: expected 1 … 61, got 62" in capsys.readouterr().err
    assert cli.main([*SMALL, "--projection", "record.json"]) == 2
    assert "--projection: expected --tp N beside it" in capsys.readouterr().err


def test_all_ranks_need_torchrun(capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert cli.main([*SMALL, "--tp", "2"]) == 2
    assert "found no RANK" in capsys.readouterr().err
