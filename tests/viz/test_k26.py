"""Kimi K2.6 in numbers, and how its record is found."""

from __future__ import annotations

import json

import pytest

from kdtree_nb import bench, viz


def a_record(tmp_path, layers, name="k26_step/captured", **more):
    def result(rows, prefix_len):
        params = {"rows": rows, "prefix_len": prefix_len, "layers": layers, "hidden": 7168} | more
        return {"name": name, "unit": "s", "samples": [1e-3 * rows], "params": params}

    fields = {"device": "a card", "date": "2026-11-30", "commit": "c", "versions": {"torch": "2"}, "command": "k"}
    path = tmp_path / f"{layers}.json"
    path.write_text(json.dumps(fields | {"results": [result(4, 64), result(1, 64), result(2, 128)]}))
    return viz.load_record(path)


def test_a_rank_of_eight_holds_an_eighth_of_what_is_split():
    whole, eighth = viz.k26.rank_memory(1), viz.k26.rank_memory(8)
    assert sum(whole.values()) == viz.k26.plan().num_bytes
    assert eighth["routed experts"] == whole["routed experts"] / 8 and eighth["embedding"] == whole["embedding"]
    assert sum(eighth.values()) == pytest.approx(viz.k26.plan().bytes_per_rank(8, 0), abs=8)
    assert viz.k26.rank(8).model.num_attention_heads == 8


def test_only_a_record_of_all_layers_counts(tmp_path):
    part, whole = a_record(tmp_path, 3), a_record(tmp_path, 61)
    assert viz.k26.recorded([part, whole]) is whole
    assert viz.k26.recorded([part]) is None and viz.k26.recorded([]) is None


def test_steps_by_rows(tmp_path):
    steps = viz.k26.measured_steps(a_record(tmp_path, 61), 64)
    assert {rows: r.median for rows, r in steps.items()} == {1: 1e-3, 4: 4e-3} and list(steps) == [1, 4]
    assert viz.k26.measured_steps(a_record(tmp_path, 61), 65) == {}


def results(name, seconds, **changes):
    params = {"tp": 8, "layers": 61, "hidden": 7168, "rows": 1, "prefix_len": 64} | changes
    return bench.Measurement(name, [seconds], params)


def test_projections_are_of_the_same_step_of_the_same_share():
    measured = [
        results("k26_tp/step", 4.0), results("k26_tp/exchanges alone", 1.0), results("k26_tp/step", 9.0, rows=2),
        results("k26_tp/exchanges alone", 1.0, rows=2),
    ]  # fmt: skip
    one_rank = [results("k26_step/captured", 2.0), results("k26_projection/all ranks", 5.0)]
    one_rank += [results(r.name, 99.0, **change) for r in one_rank for change in ({"tp": 4}, {"layers": 3})]
    (found,) = viz.k26.projections(measured, one_rank)
    assert (found.rows, found.prefix_len, found.measured_s, found.assumed_s) == (1, 64, 4.0, 5.0)
    assert found.with_exchange_s == 3.0
    assert found.assumed_error == 0.25 and found.with_exchange_error == -0.25
    assert viz.k26.projections(measured[2:], one_rank) == []


def test_a_record_of_all_ranks_has_all_layers_and_as_many_ranks(tmp_path):
    record = a_record(tmp_path, 61, "k26_tp/step", tp=8)
    assert viz.k26.recorded_ranks([a_record(tmp_path, 3, "k26_tp/step", tp=8), record]) is record
    assert viz.k26.recorded_ranks([a_record(tmp_path, 61, "k26_tp/step", tp=2)]) is None
    assert viz.k26.recorded_ranks([a_record(tmp_path, 61)]) is None


def test_the_table_of_all_ranks(tmp_path):
    assert "no record yet" in viz.k26.ranks_table(None, a_record(tmp_path, 61))
    fields = {"device": "8 × a card", "date": "2026-11-30", "commit": "c", "versions": {"torch": "2"}, "command": "k"}

    def record(name, *measurements):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(fields | {"results": [m.to_dict() for m in measurements]}))
        return viz.load_record(path)

    whole = record(
        "whole", results("k26_tp/step", 4e-3), results("k26_tp/without exchange", 2.78e-3),
        results("k26_tp/exchanges alone", 1e-3), bench.Measurement("k26_tp_memory/card", [9e10, 9.5e10], {}, "byte"),
    )  # fmt: skip
    one_rank = record("one", results("k26_step/captured", 2.6e-3), results("k26_projection/all ranks", 3e-3))
    (step,) = viz.k26.ranks_steps(whole)
    assert step[:2] == (1, 64) and step.num_sums == 122 and step.sum_us == pytest.approx(10)
    table = viz.k26.ranks_table(whole, one_rank)
    assert "4.00" in table and "1.22" in table and "3.00 (-25%) /   3.60 (-10%)" in table and "95.0 GB" in table
    assert "no record of one rank" in viz.k26.ranks_table(whole, None)
