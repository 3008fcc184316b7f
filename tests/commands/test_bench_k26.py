"""bench k26 on the command line: a small run, its record, and refusals."""

from __future__ import annotations

import json
import shlex
from types import SimpleNamespace

import pytest
import torch

from kdtree_nb import bench, cli, viz
from kdtree_nb.bench import k26
from kdtree_nb.commands import bench_k26
from kdtree_nb.commands.bench import measure
from kdtree_nb.errors import RankError

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
    with pytest.raises(SystemExit, match="2"):
        cli.main([*SMALL, "--tp", "2", "--tp-rank-of", "8"])
    assert "not allowed with argument" in capsys.readouterr().err


def test_all_ranks_need_torchrun(capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert cli.main([*SMALL, "--tp", "2"]) == 2
    assert "found no RANK" in capsys.readouterr().err


def test_a_projection_that_cannot_be_read_is_refused_before_ranks_meet(capsys, tmp_path):
    assert cli.main([*SMALL, "--tp", "2", "--projection", str(tmp_path / "none.json")]) == 2
    assert "load_record: " in (err := capsys.readouterr().err) and "none.json" in err
    (tmp_path / "half.json").write_text('{"device": ')
    assert cli.main([*SMALL, "--tp", "2", "--projection", str(tmp_path / "half.json")]) == 2
    assert "half.json: expected JSON" in capsys.readouterr().err
    fields = {"device": "a card", "date": "2026-11-30", "commit": "c", "versions": {"torch": "2"}, "command": "k"}
    step = {"name": "k26_step/captured", "unit": "s", "samples": [1.0], "params": {"tp": 2}}
    (tmp_path / "part.json").write_text(json.dumps(fields | {"results": [step]}))
    assert cli.main([*SMALL, "--tp", "2", "--projection", str(tmp_path / "part.json")]) == 2
    assert "k26_step/captured: expected a positive number 'layers'" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
@pytest.mark.parametrize("options", [[], ["--layers", "1"], ["--tp", "8"]])
def test_without_a_gpu_there_is_a_line_for_it(options, capsys):
    assert cli.main(["bench", "k26", *options]) == 2
    assert "native kernels: none for device 'cuda'" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--group", "matmul"], ["--list"], ["--judge", "record.json"]])
def test_options_of_other_groups_are_refused(option, capsys):
    assert cli.main(["bench", *option, *SMALL[1:]]) == 2
    assert f"{option[0]}: expected without k26" in capsys.readouterr().err


@pytest.fixture
def brief(monkeypatch):
    """Groups that measure nothing; the Plan and Lab are asked for as always."""
    made = {
        "bandwidth": lambda effort: [bench.Measurement("bandwidth/copy", [2.5e9] * effort.num_rounds, {}, "byte/s")]
    }
    monkeypatch.setattr(k26, "k26_groups", lambda where, plan: dict(made))
    monkeypatch.setattr(viz.records, "BENCHMARKS", None)  # no test writes there
    return made


def test_options_before_the_word_k26_count(brief, tmp_path):
    out = tmp_path / "r.json"
    assert cli.main(["bench", "--quick", "--device", "cpu", "--out", str(out), "k26", "--small"]) == 0
    found = viz.load_record(out)
    assert found.command.endswith("bench k26 --device cpu --tp-rank-of 8 --small --quick")
    assert len(found.results[0].samples) == bench.Effort.quick().num_rounds


def test_in_a_folder_the_record_has_a_name_of_its_own(brief, tmp_path, monkeypatch):
    """That of another record of the device would be overwritten; so would that of another number of ranks."""
    monkeypatch.setattr(viz.records, "BENCHMARKS", tmp_path)
    for options in ([], ["--tp-rank-of", "4"]):
        assert cli.main(["bench", "k26", "--device", "cpu", "--small", "--out", str(tmp_path / "new"), *options]) == 0
    eight, four = sorted((tmp_path / "new").iterdir(), key=lambda path: len(path.name))
    assert eight.name.endswith("-k26.json") and four.name == f"{eight.stem}-rank-of-4.json"
    assert viz.load_record(four).command.endswith("--tp-rank-of 4 --small")


def test_the_record_that_a_projection_is_taken_from_has_as_many_ranks(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(viz.records, "BENCHMARKS", tmp_path)
    args = cli.build_parser().parse_args(["bench", "k26", "--device", "cpu", "--tp", "2"])
    bench_k26.print_projection(args, [])
    assert "-k26-rank-of-2.json of one rank" in capsys.readouterr().out


def test_a_folder_called_like_a_record_is_refused_before_anything_is_measured(brief, capsys, tmp_path):
    brief["bandwidth"] = lambda effort: pytest.fail("measured")
    (tmp_path / "r.json").mkdir()
    assert cli.main(["bench", "k26", "--device", "cpu", "--small", "--out", str(tmp_path / "r.json")]) == 2
    assert "--out: expected a .json file or a folder of another name, got the folder" in capsys.readouterr().err


def test_an_interrupted_run_tells_where_its_record_is(brief, capsys, tmp_path):
    def interrupt(effort):
        raise KeyboardInterrupt

    brief["never ends"] = interrupt
    out = tmp_path / "new" / "r.json"
    assert cli.main(["bench", "k26", "--device", "cpu", "--small", "--out", str(out)]) == 130
    told = capsys.readouterr()
    assert f"record: {out}" in told.out and "interrupted" in told.err
    assert [r.name for r in viz.load_record(out).results] == ["bandwidth/copy"]


def test_a_record_of_all_ranks_tells_where_it_ended(tmp_path):
    """What fails on one rank ends all; rank 0 writes what there is."""

    def fail(effort):
        yield bench.Measurement("k26_tp/step", [1.0], {})
        raise RankError("rank 1 is gone")

    groups = {"k26_tp": fail, "never": lambda effort: pytest.fail("measured")}
    for rank in (1, 0):
        assert not (tmp_path / "r.json").exists()
        with pytest.raises(RankError, match="rank 1 is gone"):
            measure(
                groups,
                bench.Effort.quick(),
                tmp_path / "r.json",
                "words",
                "cpu",
                SimpleNamespace(rank=rank, num_ranks=2),
            )
    record = viz.load_record(tmp_path / "r.json")
    assert [r.name for r in record.results] == ["k26_tp/step"] and record.device.startswith("2 × ")
    assert record.failed == ("k26_tp: RankError: rank 1 is gone",)
