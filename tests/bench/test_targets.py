"""Targets: met, missed and not measured; what the committed records reach is listed openly."""

from __future__ import annotations

import math

import pytest

from kdtree_nb import bench, viz
from kdtree_nb.bench import Measurement, Target, judge, ratio, targets
from kdtree_nb.viz.records import BENCHMARKS

README = BENCHMARKS / "README.md"


def measured(numpy: float, native: float, **params) -> list[Measurement]:
    return [Measurement("ar_step/numpy", [9.0, numpy, numpy], params), Measurement("ar_step/native", [native], params)]


def faster(bound: float, **more) -> Target:
    return Target("cpu", "ar_step", "claim", targets.times_faster("native", "numpy"), bound, **more)


def test_ratio_of_medians():
    assert ratio(measured(6.0, 2.0), "ar_step", "numpy", "native") == 3.0
    assert ratio(measured(6.0, 2.0), "ar_step", "numpy", "none") is None
    both = [*measured(6.0, 2.0), Measurement("ar_step/native", [1.0], {"x": 1})]
    assert ratio(both, "ar_step", "numpy", "native", {"x": 1}) is None
    assert ratio(both, "ar_step", "numpy", "native", {}) == 3.0


def test_a_bound_is_met_or_missed():
    for numpy, met in ((6.0, True), (5.9, False)):
        (verdict,) = judge([faster(3.0)], measured(numpy, 2.0))
        assert verdict.met is met and verdict.got == pytest.approx(numpy / 2) and verdict.num_cells == 1
    assert judge([faster(3.0)], measured(6.0, 2.0)[:1]) == []


def test_every_cell_must_reach_it_and_the_worst_is_shown():
    both = measured(6.0, 2.0, n=1) + measured(4.0, 2.0, n=2) + measured(1.0, 2.0, n=3)
    (verdict,) = judge([faster(3.0)], both)
    assert (verdict.met, verdict.num_met, verdict.num_cells, verdict.got) == (False, 1, 3, 0.5)
    assert verdict.params == {"n": 3}
    (verdict,) = judge([faster(2.0, applies=lambda p: p["n"] < 3)], both)
    assert (verdict.met, verdict.num_cells, verdict.got) == (True, 2, 2.0)


def test_at_most_and_nan():
    most = Target("cuda", "ar_step", "claim", targets.microseconds("native"), 12, False, "µs")
    for seconds, met in ((12e-6, True), (12.1e-6, False), (math.nan, False)):
        (verdict,) = judge([most], measured(1.0, seconds))
        assert verdict.met is met
    two = judge([most], measured(1.0, 1e-6, n=1) + measured(1.0, math.nan, n=2))
    assert math.isnan(two[0].got) and not two[0].met


def test_figures():
    params = {"floor_s": 2.0, "flops": 6e12, "budget": 64, "changed_rows": 5}
    cell = {name: Measurement(f"g/{name}", [s], params) for name, s in (("a", 8.0), ("b", 3.0), ("native", 4.0))}
    assert targets.times_faster("native", "a", "b")(cell) == 0.75
    assert targets.times_faster("native", "a", "none")(cell) == 2.0
    assert targets.times_floor("native")(cell) == 2.0
    assert targets.teraflops("native")(cell) == 1.5
    assert targets.microseconds("native")(cell) == 4e6
    assert targets.param("native", "changed_rows")(cell) == 5.0
    assert targets.times_floor("none")(cell) is None and targets.param("none", "changed_rows")(cell) is None


@pytest.mark.parametrize("params", [{}, {"rows": 1}, {"rows": 1, "prefix_len": 1024, "layers": 61, "tp": 8}])
def test_params_that_cannot_be_judged_are_an_error(params):
    with pytest.raises(ValueError, match="judge: k26_step: expected params by which 'an AR step .*, got {"):
        judge(bench.targets_of("cuda"), [Measurement("k26_step/captured", [1.0], params)])


def test_a_floor_of_nothing_cannot_be_judged_by():
    target = Target("cuda", "k26_step", "claim", targets.times_floor("captured"), 2.0)
    with pytest.raises(ValueError, match="judge: k26_step: expected params by which 'claim' can be judged"):
        judge([target], [Measurement("k26_step/captured", [1.0], {"floor_s": 0})])


def test_the_share_of_the_matmul_rate():
    params = {"rows": 8192, "part": "q_b", "matmul_s": 2.0}
    for seconds, met in ((5.0, True), (5.1, False)):
        both = [Measurement("k26_prefill_product/torch", [1.0], params)]
        both += [Measurement("k26_prefill_product/native", [seconds], params)]
        (verdict,) = judge(bench.targets_of("cuda"), both)
        assert verdict.met is met and verdict.got == pytest.approx(2.0 / seconds)


def test_the_published_pipeline_counts_by_its_faster_form():
    (target,) = [t for t in bench.targets_of("cuda") if t.group == "bookkeeping" and "budget 64" in t.claim]
    for ours, times in ((5e-3, 11.5), (1e-3, 10.0)):
        params = {"budget": 64}
        both = [Measurement("bookkeeping/published", [ours], params), Measurement("bookkeeping/native", [1e-4], params)]
        assert judge([target], both)[0].got == pytest.approx(times)


def test_the_groups_of_targets_exist():
    groups = {"cpu": set(bench.GROUPS), "cuda": set(bench.cuda_groups(bench.Lab("cpu")))}
    groups["cuda"] |= {"invariance_total", "ngram_ddtree_bf16"}  # of the groups invariance and ngram_ddtree
    groups["cuda"] |= {
        "int4_linear",
        "int4_invariance_cost",
        "int4_experts",
        "int4_checks",
    }  # of tests/cuda/int4_record.py
    groups["cuda"] |= {"k26_step", "k26_step_rows", "end_to_end"}  # of `bench k26`
    groups["cuda"] |= {"k26_prefill_product", "k26_prefill_rows"}
    groups["cuda"] |= {"k26_tp", "k26_tp_build", "k26_tp_text", "k26_tp_rows"}  # of `bench k26 --tp`
    groups["cpu"].add("acceptance"), groups["cuda"].add("budget_sweep")  # of `evaluate`
    for target in bench.TARGETS:
        assert target.group in groups[target.device]
    assert {target.device for target in bench.TARGETS} == set(groups)
    assert len({(target.device, target.claim) for target in bench.TARGETS}) == len(bench.TARGETS)


def verdicts(record):
    return judge(bench.targets_of(record.device_kind), record.results)


JUDGED = [record for record in viz.load_records() if verdicts(record)]


@pytest.mark.parametrize("record", JUDGED, ids=lambda record: record.path.stem)
def test_what_a_committed_record_misses_is_listed_with_a_reason(record):
    for verdict in verdicts(record):
        assert verdict.met or verdict.target.open, verdict.target.claim
    table = bench.markdown_table(verdicts(record))
    assert f"## {record.path.name}\n" in README.read_text(encoding="utf-8")
    assert table in README.read_text(encoding="utf-8"), f"kdtree-nb bench --judge {record.path.name} prints the table"


def test_nothing_is_called_open_that_all_records_reach():
    reached: dict[str, bool] = {}
    for record in viz.load_records():
        for verdict in verdicts(record):
            reached[verdict.target.claim] = reached.get(verdict.target.claim, True) and verdict.met
    stale = [t.claim for t in bench.TARGETS if t.open and reached.get(t.claim, False)]
    assert not stale


def test_the_table_names_what_is_missed():
    target = faster(3.0, open="too slow so far")
    table = bench.markdown_table(judge([target], measured(3.0, 2.0, M=7)))
    assert table.splitlines()[2] == "| claim | ≥ 3 x | 1.5 | M 7 | **missed** (0 of 1) too slow so far |"
    assert "| M 7 | 1 of 1 |" in bench.markdown_table(judge([target], measured(9.0, 2.0, M=7)))
