"""bench: groups by name, where a record goes, what is printed, and the exit status of --check."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest
import torch

from kdtree_nb import bench, cli, viz
from kdtree_nb.bench import Measurement


@pytest.fixture
def slow_native(monkeypatch):
    """Groups that measure nothing and say that the native step takes twice as long as numpy's."""
    groups = {
        "ar_step": lambda effort: [
            Measurement("ar_step/numpy", [1e-3] * effort.num_rounds, {"dtype": "float32"}),
            Measurement("ar_step/native", [2e-3] * effort.num_rounds, {"dtype": "float32"}),
        ],
        "bandwidth": lambda effort: [Measurement("bandwidth/copy", [2.5e9], {}, "byte/s")],
    }
    monkeypatch.setattr(bench, "GROUPS", groups)
    monkeypatch.setattr(viz.records, "BENCHMARKS", None)  # no test writes there


def test_a_quick_run_prints_and_writes_only_where_told(capsys, tmp_path, slow_native):
    assert cli.main(["bench", "--quick"]) == 0
    out = capsys.readouterr().out
    assert "record:" not in out and "2.5 Gbyte/s" in out and "2 ms     0.50x  dtype=float32" in out
    assert "MISSED" in out and "numpy reference: 0.5 of 3 x (ar_step)" in out
    assert cli.main(["bench", "--quick", "--group", "ar_step", "--out", str(tmp_path / "r.json")]) == 0
    found = viz.load_record(tmp_path / "r.json")
    assert found.command.endswith("kdtree-nb bench --quick --group ar_step")
    assert [r.name for r in found.results] == ["ar_step/numpy", "ar_step/native"]


def test_a_full_run_writes_to_the_folder_of_records(capsys, tmp_path, slow_native, monkeypatch):
    monkeypatch.setattr(viz.records, "BENCHMARKS", tmp_path)
    assert cli.main(["bench"]) == 0
    (path,) = tmp_path.glob("*.json")
    assert f"record: {path}" in capsys.readouterr().out
    samples = json.loads(path.read_text())["results"][0]["samples"]
    assert len(samples) == bench.Effort().num_rounds > bench.Effort.quick().num_rounds


def test_check_has_status_1_when_a_target_is_missed(slow_native):
    assert cli.main(["bench", "--quick", "--check"]) == 1
    assert cli.main(["bench", "--quick", "--check", "--group", "bandwidth"]) == 0


def test_judge_with_check_has_status_1_when_a_target_is_missed(capsys, tmp_path, slow_native):
    assert cli.main(["bench", "--quick", "--out", str(tmp_path / "r.json")]) == 0
    assert cli.main(["bench", "--judge", str(tmp_path / "r.json")]) == 0
    assert cli.main(["bench", "--judge", str(tmp_path / "r.json"), "--check"]) == 1
    assert "**missed**" in capsys.readouterr().out


@pytest.mark.parametrize("option", [["--quick"], ["--out", "r.json"], ["--group", "ar_step"], ["--device", "cpu"]])
def test_judging_measures_nothing(capsys, option):
    assert cli.main(["bench", "--judge", "r.json", *option]) == 2
    assert f"{option[0]}: expected without --judge, which measures nothing" in capsys.readouterr().err


def test_judge_tells_of_groups_that_failed(capsys, tmp_path, slow_native):
    def fail(effort):
        yield Measurement("ar_step/numpy", [9.0], {"dtype": "float32"})
        yield Measurement("ar_step/native", [1.0], {"dtype": "float32"})
        raise RuntimeError("no luck")

    bench.GROUPS = {"ar_step": fail}
    assert cli.main(["bench", "--quick", "--out", str(tmp_path / "r.json")]) == 1
    capsys.readouterr()
    assert cli.main(["bench", "--judge", str(tmp_path / "r.json")]) == 0
    told = capsys.readouterr().out
    assert "1 of 1" in told and "**missed**" not in told and told.endswith("FAILED  ar_step: RuntimeError: no luck\n")
    assert cli.main(["bench", "--judge", str(tmp_path / "r.json"), "--check"]) == 1


def test_a_record_that_no_target_is_about_is_not_judged(capsys):
    path = viz.records.BENCHMARKS / "nvidia-h200-sanitizer.json"
    assert cli.main(["bench", "--judge", str(path)]) == 2
    err = capsys.readouterr().err
    assert f"--judge: {path}: expected results that a target of cuda is about, of " in err and "got sanitizer" in err


def test_where_nothing_was_measured_an_older_record_stays(capsys, tmp_path, slow_native):
    out = tmp_path / "r.json"
    assert cli.main(["bench", "--quick", "--out", str(out)]) == 0
    before = out.read_text()
    bench.GROUPS = {"broken": lambda effort: 1 / 0}
    assert cli.main(["bench", "--quick", "--out", str(out)]) == 1
    assert out.read_text() == before and "FAILED  broken: ZeroDivisionError" in capsys.readouterr().out


def test_list_and_unknown_group(capsys):
    assert cli.main(["bench", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(bench.GROUPS)
    assert cli.main(["bench", "--group", "none"]) == 2
    assert "--group: expected names of ar_step" in capsys.readouterr().err


def test_a_failed_group_is_reported_and_the_rest_is_kept(capsys, tmp_path, slow_native):
    def fail(effort):
        raise RuntimeError("no luck")

    bench.GROUPS = {"broken": fail, **bench.GROUPS}
    assert cli.main(["bench", "--quick", "--out", str(tmp_path / "r.json")]) == 1
    assert "FAILED  broken: RuntimeError: no luck" in capsys.readouterr().out
    fields = json.loads((tmp_path / "r.json").read_text())
    assert fields["failed"] == [{"group": "broken", "reason": "RuntimeError: no luck"}]
    assert [r["name"] for r in fields["results"]] == ["ar_step/numpy", "ar_step/native", "bandwidth/copy"]


def test_a_place_that_cannot_be_written_is_an_error_before_anything_is_measured(capsys, slow_native):
    bench.GROUPS = {"never": lambda effort: pytest.fail("measured")}
    assert cli.main(["bench", "--out", "/dev/null/r.json"]) == 2
    assert "--out: expected a folder to write to, got /dev/null (File exists)" in capsys.readouterr().err


def test_the_record_is_kept_as_it_grows(tmp_path, slow_native):
    seen = []

    def look(effort):
        seen.append([r["name"] for r in json.loads((tmp_path / "r.json").read_text())["results"]])
        raise KeyboardInterrupt

    bench.GROUPS = {**bench.GROUPS, "look": look}
    assert cli.main(["bench", "--quick", "--out", str(tmp_path / "r.json")]) == 130
    assert seen[-1] == ["ar_step/numpy", "ar_step/native", "bandwidth/copy"]


def test_a_run_that_is_terminated_leaves_its_record(capsys, tmp_path, slow_native):
    def limit(effort):
        yield Measurement("limit/x", [1.0], {})
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)

    handler = signal.getsignal(signal.SIGTERM)
    bench.GROUPS = {**bench.GROUPS, "limit": limit}
    assert cli.main(["bench", "--quick", "--out", str(tmp_path / "r.json")]) == 130
    record = viz.load_record(tmp_path / "r.json")
    assert record.results[-1].name == "limit/x" and record.failed == ("limit: KeyboardInterrupt: ",)
    assert "interrupted" in capsys.readouterr().err and signal.getsignal(signal.SIGTERM) is handler


def test_groups_of_a_gpu_are_listed_without_one(capsys):
    assert cli.main(["bench", "--device", "cuda", "--list"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == list(bench.cuda_groups(bench.Lab("cpu")))


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_a_gpu_is_not_replaced_by_anything(capsys):
    assert cli.main(["bench", "--device", "cuda", "--quick", "--group", "bandwidth"]) == 2
    assert "none for device 'cuda'" in capsys.readouterr().err


def test_judge_prints_what_a_record_reaches(capsys):
    (path,) = viz.records.BENCHMARKS.glob("amd-*.json")
    assert cli.main(["bench", "--judge", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    targets = [target for target in bench.targets_of("cpu") if target.group != "acceptance"]  # of `evaluate`
    assert len(lines) == 2 + len(targets)
    for target, line in zip(targets, lines[2:], strict=True):
        assert target.claim in line
        assert "1 of 1" in line or (target.open and f"**missed** (0 of 1) {target.open}" in line)
