"""calibrate: measures, keeps the result where budget auto finds it, and says where."""

from __future__ import annotations

import json

import pytest

from kdtree_nb import cli
from kdtree_nb.speculate import CostModel

QUICK = ["--model", "tiny2", "--max-budget", "4", "--streams", "1", "--prefix-len", "4", "16", "--rounds", "1"]


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """The user's data folder, empty."""
    monkeypatch.setenv("KDTREE_DATA_DIR", str(tmp_path))
    return tmp_path / "calibration"


def test_auto_works_once_it_is_calibrated(capsys, folder):
    generate = ["generate", "--model", "tiny2", "--prompt", "ab", "--max-new-tokens", "8", "--budget"]
    assert cli.main([*generate, "auto"]) == 2
    assert "measure it once: kdtree-nb calibrate" in capsys.readouterr().err
    assert cli.main(["calibrate", *QUICK]) == 0
    out = capsys.readouterr().out
    (path,) = folder.glob("*.json")
    assert out.splitlines()[-1] == f"written: {path}" and "NGram of depth 16" in out and "prefix 16" in out
    texts = []
    for budget in ("auto", "3"):
        for mode in ("tree", "chain"):
            assert cli.main([*generate, budget, "--mode", mode]) == 0
            texts.append(capsys.readouterr().out)
    assert len(set(texts)) == 1


def test_json_and_another_folder(capsys, folder, tmp_path):
    out = tmp_path / "elsewhere"
    assert (
        cli.main(["calibrate", *QUICK, "--drafter", "random", "--drafter", "ngram", "--json", "--out", str(out)]) == 0
    )
    cost = CostModel.from_dict(json.loads(capsys.readouterr().out))
    names = ["Random of depth 7", "Random of depth 7, chain", "NGram of depth 16", "NGram of depth 16, chain"]
    assert list(cost.overhead) == names and not folder.exists()
    (path,) = out.glob("*.json")
    assert CostModel.from_dict(json.loads(path.read_text())) == cost


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--max-budget", "0"], "max_budget: expected 1 … 1023, got 0"),
        (["--out", "/dev/null/x"], "--out: expected a folder to write to, got /dev/null/x (Not a directory)"),
        (["--streams", "4", "1"], "num_streams: expected"),
        (["--prefix-len", "1000000000"], "prefix_len: expected at most 2006, which leaves room for trees of 4 nodes"),
    ],
)
def test_bad_options(capsys, options, error):
    assert cli.main(["calibrate", *QUICK, *options]) == 2
    assert error in capsys.readouterr().err
