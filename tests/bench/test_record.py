"""Records: what viz reads is what was measured, and nothing in it names a place."""

from __future__ import annotations

import re
import subprocess

import pytest

from kdtree_nb import viz
from kdtree_nb.bench import Failure, Measurement, make_record, record, write_record

MEASURED = [Measurement("g/a", [0.1, 0.2], {"n": 1}), Measurement("g/b", [3e9], {}, "byte/s")]


def test_a_record_is_read_back(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    fields = make_record(MEASURED, "kdtree-nb bench")
    found = viz.load_record(write_record(fields, tmp_path / "new" / "a.json"))
    assert [(r.name, r.unit, r.samples, r.params) for r in found.results] == [
        ("g/a", "s", (0.1, 0.2), {"n": 1}),
        ("g/b", "byte/s", (3e9,), {}),
    ]
    assert found.command == "OMP_NUM_THREADS=1 kdtree-nb bench" and {"python", "torch", "numpy"} <= set(found.versions)
    assert re.fullmatch(r"[0-9a-f]{12}(-dirty)?|unknown", found.commit)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", found.date)
    assert fields["threads"] >= 1


def test_a_folder_gets_a_file_named_after_the_device(tmp_path):
    fields = make_record(MEASURED, "kdtree-nb bench") | {"device": "Some CPU @ 2.4, 2 threads"}
    assert write_record(fields, tmp_path).name == "some-cpu-2.4-2-threads.json"


@pytest.mark.parametrize("error", [OSError("no git"), subprocess.CalledProcessError(1, "git")])
def test_without_git(monkeypatch, error):
    def fail(*args):
        raise error

    monkeypatch.setattr(record, "_git", fail)
    monkeypatch.delenv(record.COMMIT_VARIABLE, raising=False)
    assert record.commit() == "unknown"


def test_a_named_commit_comes_before_that_of_a_folder(monkeypatch):
    monkeypatch.setenv(record.COMMIT_VARIABLE, "fedcba987654")
    assert record.commit() == "fedcba987654"


def test_a_record_of_a_gpu_says_what_drove_it(monkeypatch, tmp_path):
    answers = ["NVIDIA Some", {"python": "3"}, {"driver_version": "1"}]
    for name, answer in zip(("device_label", "versions", "gpu_state"), answers, strict=True):
        monkeypatch.setattr(record, name, lambda *args, answer=answer: answer)
    fields = make_record(MEASURED, "kdtree-nb bench --device cuda", "cuda", [Failure("g", "why")])
    path = write_record(fields, tmp_path)
    assert path.name == "nvidia-some.json" and viz.load_record(path).device_kind == "cuda"
    assert fields["gpu"] == answers[2] and fields["failed"] == [{"group": "g", "reason": "why"}]


def test_the_state_of_a_gpu_is_empty_where_the_driver_does_not_answer(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert record.gpu_state() == {}


def test_the_fields_of_a_gpu(monkeypatch):
    done = subprocess.CompletedProcess([], 0, stdout="580.1, 1980 MHz, 1980 MHz, 3201 MHz, 700.00 W, 143771 MiB\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **more: done)
    state = record.gpu_state()
    assert state["driver_version"] == "580.1" and state["memory.total"] == "143771 MiB" and len(state) == 6


def test_changed_sources_are_marked(monkeypatch):
    monkeypatch.delenv(record.COMMIT_VARIABLE, raising=False)
    answers = {"rev-parse": "0123456789ab", "status": " M kernels/linear.cpp"}
    monkeypatch.setattr(record, "_git", lambda command, *args: answers[command])
    assert record.commit() == "0123456789ab-dirty"
    answers["status"] = ""
    assert record.commit() == "0123456789ab"
