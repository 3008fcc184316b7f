"""Records: what viz reads is what was measured, and nothing in it names a place."""

from __future__ import annotations

import re
import subprocess

import pytest

from kdtree_nb import viz
from kdtree_nb.bench import Measurement, make_record, record, write_record

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
    assert record.commit() == "unknown"


def test_changed_sources_are_marked(monkeypatch):
    answers = {"rev-parse": "0123456789ab", "status": " M kernels/linear.cpp"}
    monkeypatch.setattr(record, "_git", lambda command, *args: answers[command])
    assert record.commit() == "0123456789ab-dirty"
    answers["status"] = ""
    assert record.commit() == "0123456789ab"
