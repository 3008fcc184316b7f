"""What is read from records by budget, and drawn, is what they hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from kdtree_nb import viz
from kdtree_nb.viz.records import Record, Result


def result(name, value, unit="s", **params):
    return Result(name, unit, (value,), {"set": "code", "num_texts": 4, "num_tokens": 100, **params})


RESULTS = (
    result("acceptance/DFlash", 5.0, "token", budget=8, expected=4.1),
    result("acceptance/DFlash", 4.0, "token", budget="chain", expected=3.1),
    result("acceptance/DFlash", 9.0, "token", budget=8, set="prose", expected=1.0),
    *(
        result(f"budget_sweep{suffix}/{way}", value, unit)
        for suffix, unit, values in (("", "s", (8.0, 4.0, 2.0, 1.0)), ("_tau", "token", (1.0, 4.0, 5.0, 6.0)))
        for way, value in zip(("AR", "chain", "tree 8", "tree auto"), values, strict=True)
    ),
    Result("expert_coverage/DFlash", "expert", (3.0, 5.0), {"set": "code", "rows": 2}),
)
RECORD = Record("box", "2026-11-30", "abc", {"torch": "2"}, "kdtree-nb evaluate", RESULTS, Path("a.json"))


def test_figures_by_budget():
    assert viz.by_budget(RECORD, "acceptance/DFlash", set="code") == {8: 5.0, "chain": 4.0}
    assert viz.by_budget(RECORD, "acceptance/DFlash", "expected", set="prose") == {8: 1.0}
    with pytest.raises(ValueError, match="expected one result at 8, got several"):
        viz.by_budget(RECORD, "acceptance/DFlash")
    with pytest.raises(ValueError, match="a.json: expected results of acceptance/NGram with .*, got none"):
        viz.by_budget(RECORD, "acceptance/NGram")


def test_a_sweep():
    found = viz.sweep(RECORD, set="code")
    assert found.tokens_per_s == {"AR": 50.0, "chain": 100.0, 8: 200.0, "auto": 400.0}
    assert found.speedup["chain"] == 2.0 and found.efficiency["chain"] == 0.5 and found.efficiency["AR"] == 1.0
    assert found.step_s[8] == pytest.approx(5 / 200)
    with pytest.raises(ValueError, match="expected budget_sweep and its tau with .*prose"):
        viz.sweep(RECORD, set="prose")
    twice = Record("box", "2026-11-30", "abc", {"torch": "2"}, "c", RESULTS + RESULTS[3:4], Path("a.json"))
    with pytest.raises(ValueError, match="budget_sweep/AR: expected one result with"):
        viz.sweep(twice, set="code")


def changed(name, **params):
    """RECORD, whose results of that name have these params; one that is None they lack."""
    kept = {key: value for key, value in params.items() if value is not None}
    results = [
        Result(r.name, r.unit, r.samples, {k: v for k, v in r.params.items() if k not in params} | kept)
        if r.name == name
        else r
        for r in RESULTS
    ]
    return Record("box", "2026-11-30", "abc", {"torch": "2"}, "c", tuple(results), Path("a.json"))


def test_a_record_that_lacks_a_field_says_which():
    with pytest.raises(ValueError, match="by_budget: a.json: acceptance/DFlash: expected a budget and 'expected', got"):
        viz.by_budget(changed("acceptance/DFlash", expected=None), "acceptance/DFlash", "expected", set="code")
    with pytest.raises(ValueError, match="by_budget: a.json: acceptance/DFlash: expected a budget and None, got"):
        viz.by_budget(changed("acceptance/DFlash", budget=[8]), "acceptance/DFlash")
    for missing in ("num_texts", "num_tokens"):
        with pytest.raises(ValueError, match=f"budget_sweep/chain: expected a positive number '{missing}'"):
            viz.sweep(changed("budget_sweep/chain", **{missing: None}))
    with pytest.raises(ValueError, match="expert_coverage/DFlash: expected a positive number 'rows'"):
        viz.coverage_by_rows(changed("expert_coverage/DFlash", rows=None), "DFlash")


def test_a_way_to_decode_that_is_none_is_refused():
    record = Record(
        "box", "2026", "abc", {"torch": "2"}, "c", (*RESULTS, result("budget_sweep/bush", 1.0)), Path("a.json")
    )
    with pytest.raises(ValueError, match="sweep: a.json: expected AR, chain, .* got budget_sweep/bush"):
        viz.sweep(record)


def test_coverage_by_rows():
    assert viz.coverage_by_rows(RECORD, "DFlash", set="code") == {2: (3.0, 5.0)}
    with pytest.raises(ValueError, match="expected expert_coverage/NGram with {}, got none"):
        viz.coverage_by_rows(RECORD, "NGram")


def test_bars_are_stacked():
    ax = viz.plot_breakdown({"AR": {"verify": 1e-3}, "tree": {"verify": 2e-3, "draft": 3e-3}}).axes[0]
    verify, draft = ax.containers
    assert [bar.get_height() for bar in verify] == [1.0, 2.0] and [bar.get_height() for bar in draft] == [0.0, 3.0]
    assert [bar.get_y() for bar in draft] == [1.0, 2.0]
    with pytest.raises(ValueError, match="at least one way to decode, got none"):
        viz.plot_breakdown({})
