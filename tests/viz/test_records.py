"""Records: good ones are read, each kind of bad one is refused by name, medians come from raw samples."""

from __future__ import annotations

import copy
import json

import pytest

from kdtree_nb import viz

GOOD = {
    "device": "NVIDIA H200",
    "date": "2026-12-01T10:00:00",
    "commit": "abc123",
    "versions": {"torch": "2.13.0"},
    "command": "kdtree-nb bench",
    "results": [
        {"name": "step/numpy", "unit": "s", "samples": [0.3, 0.1, 0.2], "params": {"rows": 1}},
        {"name": "step/numpy", "unit": "s", "samples": [0.5], "params": {"rows": 17}},
        {"name": "step/native", "unit": "s", "samples": [0.05, 0.04], "params": {"rows": 1}},
    ],
}


def write(path, change=lambda record: None):
    record = copy.deepcopy(GOOD)
    change(record)
    path.write_text(json.dumps(record))
    return path


def test_a_record_is_read(tmp_path):
    record = viz.load_record(write(tmp_path / "a.json"))
    assert record.label == "NVIDIA H200 · 2026-12-01 · torch 2.13.0"
    assert record.find("step/numpy", rows=1).median == 0.2
    assert record.find("step/native").samples == (0.05, 0.04)
    assert record.find("step/none") is None and record.failed == ()
    with pytest.raises(ValueError, match="expected one result, got params"):
        record.find("step/numpy")


def test_a_folder_is_read_in_order(tmp_path):
    for name in ("b", "a"):
        write(tmp_path / f"{name}.json", lambda r, name=name: r.update(device=name))
    (tmp_path / "README.md").write_text("")
    assert [r.device for r in viz.load_records(tmp_path)] == ["a", "b"]
    assert viz.load_records(tmp_path / "none") == []


BAD = {
    "device": lambda r: r.update(device=""),
    "date": lambda r: r.pop("date"),
    "commit": lambda r: r.update(commit=None),
    "versions": lambda r: r.update(versions={}),
    "command": lambda r: r.update(command=3),
    "results": lambda r: r.update(results=[]),
    "device_kind": lambda r: r.update(device_kind="tpu"),
    "samples": lambda r: r["results"][0].update(samples=[]),
    r"results\[1\]": lambda r: r["results"][1].pop("name"),
    "step/native": lambda r: r["results"][2].update(samples=[1.0, -1.0]),
    "unit": lambda r: r["results"][0].pop("unit"),
    "params": lambda r: r["results"][0].update(params=[]),
    "failed: expected groups and reasons": lambda r: r.update(failed=[{"group": "a"}]),
    "failed: expected groups and reasons, got 3": lambda r: r.update(failed=3),
}


@pytest.mark.parametrize("field", BAD)
def test_each_bad_field_is_named(tmp_path, field: str):
    with pytest.raises(ValueError, match=f"bad.json.*{field}"):
        viz.load_record(write(tmp_path / "bad.json", BAD[field]))


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '"x"'])
def test_what_is_no_record_is_refused(tmp_path, text: str):
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ValueError, match=r"bad\.json"):
        viz.load_record(tmp_path / "bad.json")


def test_what_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ValueError, match="load_record: .*none.json: expected a record, got No such file"):
        viz.load_record(tmp_path / "none.json")
    with pytest.raises(ValueError, match="load_record: .*: expected a record, got Is a directory"):
        viz.load_record(tmp_path)
    (tmp_path / "deep.json").write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(ValueError, match=r"deep\.json: expected JSON, got maximum recursion depth"):
        viz.load_record(tmp_path / "deep.json")


def test_a_sample_beyond_what_float_holds_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"bad\.json: results\[1\] \(step/numpy\): samples: expected positive finite"):
        viz.load_record(write(tmp_path / "bad.json", lambda r: r["results"][1].update(samples=[10**400])))


@pytest.mark.parametrize("rows", [None, "1", 0, -1, True, float("nan"), 10**400, [1]])
def test_a_param_is_a_positive_number(tmp_path, rows):
    record = viz.load_record(write(tmp_path / "a.json", lambda r: r["results"][0]["params"].update(rows=rows)))
    with pytest.raises(ValueError, match="record: step/numpy: expected a positive number 'rows' among the params, got"):
        viz.records.number(record.results[0], "rows")
    assert viz.records.number(record.results[1], "rows") == 17


def test_a_nan_sample_is_refused(tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(GOOD).replace("0.05", "NaN"))
    with pytest.raises(ValueError, match="positive finite"):
        viz.load_record(path)


def test_the_committed_records_are_good():
    records = viz.load_records()
    assert all(r.results for r in records)
