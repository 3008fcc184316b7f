"""Kimi K2.6 in numbers, and how its record is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kdtree_nb import bench, viz


def a_record(tmp_path, layers, name="k26_step/captured", **more):
    def result(rows, prefix_len):
        params = {"tp": 8, "rows": rows, "prefix_len": prefix_len, "layers": layers, "hidden": 7168} | more
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
    assert viz.k26.recorded([whole], 4) is None


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
    assert "no `share` has been measured" in viz.k26.told_source(one_rank)


def test_projections_start_from_a_rank_among_others_where_there_is_one():
    measured = [results("k26_tp/step", 4.0), results("k26_tp/exchanges alone", 1.0)]
    one_rank = [results("k26_step/captured", 2.0), results("k26_step/share", 2.5), results("k26_step/captured", 9.0)]
    one_rank += [results("k26_projection/all ranks", 5.0)]
    assert viz.k26.projected_from(one_rank) == "share" and viz.k26.projected_from(one_rank[:1]) == "captured"
    (found,) = viz.k26.projections(measured, iter(one_rank))
    assert found.with_exchange_s == 3.5
    assert "`share`: a rank's own part" in viz.k26.told_source(one_rank)


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
    assert table.splitlines()[1] == viz.k26.told_source(one_rank.results)
    assert "no record of one rank" in viz.k26.ranks_table(whole, None)
    assert "projected from" not in viz.k26.ranks_table(whole, None)


def record_of(tmp_path, name, *measurements):
    fields = {"device": "a card", "date": "2026-11-30", "commit": "c", "versions": {"torch": "2"}, "command": "k"}
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(fields | {"results": [m.to_dict() for m in measurements]}))
    return viz.load_record(path)


def of_kernel(name, seconds, launches, rows=1):
    return bench.Measurement(f"k26_kernels/{name}", [seconds], {"rows": rows, "launches": launches, "layers": 61})


def test_kernels_are_added_up_by_name_and_products_by_their_weights(tmp_path):
    shape = "linear_tile_kernel<TileShape<__nv_bfloat16, 1, 8, {}, false, {}>>"
    record = record_of(
        tmp_path, "kernels", of_kernel(shape.format(1, 0), 1e-3, 61), of_kernel(shape.format(2, 2), 2e-3, 120),
        of_kernel(shape.format(3, 1), 3e-3, 5), of_kernel("rope_kernel<float>", 5e-4, 100),
        of_kernel("rope_kernel<half>", 25e-5, 22), of_kernel("argmax_kernel", 1e-4, 2),
        of_kernel("rope_kernel", 9, 1, 16),
    )  # fmt: skip
    most, floats, rest = viz.k26.kernels(record, 1, 2)
    assert most == ("linear_tile, INT4", 125, pytest.approx(5e-3)) and most.each_us == pytest.approx(40)
    assert floats == ("linear_tile, floats", 61, pytest.approx(1e-3))
    assert rest == ("2 others", 124, pytest.approx(85e-5))
    assert [kernel.name for kernel in viz.k26.kernels(record, 1)][2:] == ["rope", "argmax"]
    assert viz.k26.kernels(record, 2) == viz.k26.kernels(None, 1) == []
    table = viz.k26.kernels_table(record, 1)
    assert "5.1 launches, 112 µs" in table and "73.0%" in table and "100.0%" in table
    assert "no record" in viz.k26.kernels_table(record, 2)


def test_weights_of_a_product_are_found_before_its_booleans_and_of_both_of_a_pair(tmp_path):
    floats, int4 = (
        "TileShape<__nv_bfloat16, 8, 1, 2, true, 0, false>",
        "TileShape<__nv_bfloat16, 2, 4, 2, false, 1, true>",
    )
    names = (
        f"linear_tile_kernel<{floats}>",
        f"linear_pair_kernel<{floats}, {int4}>",
        f"linear_pair_kernel<{int4}, {int4}>",
    )
    record = record_of(tmp_path, "pairs", *(of_kernel(name, 3e-3 - i / 1e3, 60) for i, name in enumerate(names)))
    found = [kernel.name for kernel in viz.k26.kernels(record, 1)]
    assert found == ["linear_tile, floats", "linear_pair, floats and INT4", "linear_pair, INT4"]


def test_what_was_tried_is_shown_from_the_records_that_there_are(tmp_path):
    one_rank = record_of(
        tmp_path, "one", results("k26_layer/floats first", 6e-4), results("k26_layer/captured", 2e-4),
        results("k26_launch/eager", 3e-3, rows=16), results("k26_launch/captured", 4e-3, rows=16),
    )  # fmt: skip
    cells = [
        bench.Measurement(f"int4_linear/{name}", [seconds], {"M": 8, "K": size})
        for name, size, seconds in (
            ("torch BF16", 1, 5e-5), ("torch BF16", 2, 1e-5), ("native", 1, 1e-5), ("native", 2, 1e-5),
        )
    ]  # fmt: skip
    table = viz.k26.gains_table(one_rank, record_of(tmp_path, "int4", *cells))
    packed, captured, products = table.splitlines()[1:]
    assert packed.split()[-4:] == ["1", "600", "200", "3.00"] and captured.split()[-1] == "0.75"
    assert products.startswith("2 products") and products.split()[-4:] == ["8", "60", "20", "3.00"]
    assert len(viz.k26.gains_table(one_rank, None).splitlines()) == 3
    assert "no record" in viz.k26.gains_table(None, None)


def test_exchanges_of_several_ranks():
    """The line about experts stands below a record that lets rows without exchange choose for themselves."""

    def record(**params):
        results = []
        for rows, seconds in ((8, (3e-3, 2e-3, 1.5e-3)), (1, (2e-3, 1.5e-3, 4e-4))):
            place = {"tp": 2, "layers": 6, "rows": rows, "prefix_len": 1024, **params}
            names = ("step", "without exchange", "exchanges alone")
            results += [viz.Result(f"k26_tp/{n}", "s", (s,) * 3, place) for n, s in zip(names, seconds, strict=True)]
        return viz.Record("2 x H200", "2026-12-01", "abc", {"torch": "2"}, "bench", tuple(results), Path("x.json"))

    lines = viz.k26.exchanges_table(record(same_experts=True)).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["1", "1,024", "2.00", "1.50", "+0.50", "0.40", "3"],
        ["8", "1,024", "3.00", "2.00", "+1.00", "1.50", "3"],
    ]
    told = viz.k26.exchanges_table(record()).splitlines()
    assert told[:-1] == lines and "the rows took other experts" in told[-1]


def without(*names):
    """Results of the step of a rank and of all ranks, by the name of the group that lack these params."""
    found = [
        results(name, seconds)
        for name, seconds in (
            ("k26_step/captured", 2e-3), ("k26_step/share", 2e-3), ("k26_projection/all ranks", 3e-3),
            ("k26_tp/step", 4e-3), ("k26_tp/without exchange", 3e-3), ("k26_tp/exchanges alone", 1e-3),
            ("k26_launch/eager", 3e-3), ("k26_launch/captured", 2e-3),
        )
    ]  # fmt: skip
    found += [bench.Measurement("k26_kernels/a_kernel", [1e-3], {"rows": 1, "layers": 61, "launches": 3})]
    return [bench.Measurement(m.name, m.samples, {k: v for k, v in m.params.items() if k not in names}) for m in found]


READERS = {
    "projections": (
        lambda r: viz.k26.projections(r.results, r.results), ("tp", "layers", "hidden", "rows", "prefix_len")
    ),
    "ranks_steps": (viz.k26.ranks_steps, ("rows", "prefix_len", "layers")),
    "ranks_table": (lambda r: viz.k26.ranks_table(r, None), ("rows", "prefix_len", "layers")),
    "exchanges_table": (viz.k26.exchanges_table, ("rows", "prefix_len")),
    "measured_steps": (lambda r: viz.k26.measured_steps(r, 64, "share"), ("rows", "prefix_len")),
    "kernels": (lambda r: viz.k26.kernels(r, 1), ("rows", "launches")),
    "kernels_table": (lambda r: viz.k26.kernels_table(r, 1), ("rows", "launches", "layers")),
    "gains_table": (lambda r: viz.k26.gains_table(r, None), ("rows",)),
}  # fmt: skip


@pytest.mark.parametrize(("reader", "missing"), [(name, param) for name, (_, of) in READERS.items() for param in of])
def test_a_record_that_lacks_a_param_says_which(tmp_path, reader, missing):
    read = READERS[reader][0]
    assert read(record_of(tmp_path, "whole", *without()))
    with pytest.raises(ValueError, match=f"record: k26_.*: expected a positive number '{missing}' among the params"):
        read(record_of(tmp_path, "part", *without(missing)))


def test_exchanges_that_were_not_measured_are_named(tmp_path):
    measured = [m for m in without() if m.name != "k26_tp/exchanges alone"]
    with pytest.raises(
        ValueError, match="exchanges_table: part.json: expected k26_tp/exchanges alone of 1 rows behind"
    ):
        viz.k26.exchanges_table(record_of(tmp_path, "part", *measured))
    with pytest.raises(ValueError, match="exchanges_table: part.json: expected k26_tp/step and its without exchange"):
        viz.k26.exchanges_table(record_of(tmp_path, "part", *measured[:3]))


def test_a_record_without_share_or_kernels_is_read_as_such(tmp_path):
    old = record_of(
        tmp_path, "old", *(m for m in without() if m.name not in ("k26_step/share", "k26_kernels/a_kernel"))
    )
    assert viz.k26.recorded([old]) is old and viz.k26.measured_steps(old, 64, "share") == {}
    assert viz.k26.projected_from(old.results) == "captured" and len(viz.k26.projections(old.results, old.results)) == 1
    assert viz.k26.kernels(old, 1) == [] and "no record by kernel yet" in viz.k26.kernels_table(old, 1)
