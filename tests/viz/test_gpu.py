"""Figures of a GPU's record: what is drawn is what the record holds, and each says where it comes from."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from kdtree_nb.viz import Record, Result, gpu


def result(name: str, seconds: float, **params) -> Result:
    return Result(name, "s", (9.0, seconds, seconds), params)


def record() -> Record:
    results = []
    for M, native, torch, floor in ((1, 2e-6, 3e-6, 1e-6), (16, 4e-6, 3e-6, 2e-6)):
        sizes = {"M": M, "K": 64, "N": 32, "dtype": "bfloat16", "floor_s": floor}
        results += [result("linear/native", native, **sizes), result("linear/torch", torch, **sizes)]
    for prefix in (1024, 8192):
        for rows in (1, 8):
            sizes = {"prefix_len": prefix, "rows": rows, "heads": 8, "floor_s": 1e-6}
            results.append(result("verify_attn_sweep/native", prefix * rows * 1e-9, **sizes))
            if rows == 8:
                results.append(result("verify_attn_sweep/torch masked", 5e-5, **sizes))
    for budget in (64, 256):
        results.append(result("bookkeeping/native", budget * 1e-6, budget=budget))
        results.append(result("bookkeeping/published", budget * 1e-5, budget=budget))
    for group in ("ar_step", "ar_step_bf16"):
        for contender, seconds in (("eager torch", 2e-3), ("torch graph", 5e-4), ("native", 2.5e-4)):
            results.append(result(f"{group}/{contender}", seconds))
    for group in ("ngram_ddtree_prompt", "ngram_ddtree_bf16_prompt"):
        for prompt, seconds in (("a", 0.01), ("b", 0.03)):
            results.append(result(f"{group}/DDTree", seconds, prompt=prompt, num_tokens=100))
    versions = {"torch": "2.11"}
    return Record("Some GPU", "2026-12-01", "abc", versions, "kdtree-nb bench", tuple(results), Path("g.json"), "cuda")


def lines(ax) -> dict[str, list[float]]:
    return {line.get_label(): list(line.get_ydata()) for line in ax.get_lines()}


def test_series_are_medians_over_one_param():
    found = gpu.series(record(), "linear", "M", K=64, N=32)
    assert found.x == (1, 16) and found.seconds == {"native": (2e-6, 4e-6), "torch": (3e-6, 3e-6)}
    assert found.floor_s == (1e-6, 2e-6) and found.times_floor("native") == (2.0, 2.0)
    assert found.times_faster("native", "torch") == (1.5, 0.75)


def test_what_was_not_measured_is_nan_and_has_no_floor():
    found = gpu.series(record(), "verify_attn_sweep", "rows", prefix_len=1024)
    assert math.isnan(found.seconds["torch masked"][0]) and found.seconds["torch masked"][1] == 5e-5
    steps = gpu.series(record(), "bookkeeping", "budget")
    assert steps.floor_s is None
    with pytest.raises(ValueError, match="expected measurements with floor_s"):
        steps.times_floor("native")


def test_missing_and_ambiguous_results_are_named():
    with pytest.raises(ValueError, match=r"g.json: expected results of linear with M and \{'K': 65\}"):
        gpu.series(record(), "linear", "M", K=65)
    with pytest.raises(ValueError, match="verify_attn_sweep/native: expected one result at rows"):
        gpu.series(record(), "verify_attn_sweep", "rows")


def test_linear_and_attention():
    fig = gpu.plot_linear(record(), [(64, 32)])
    assert lines(fig.axes[0]) == {
        "native": pytest.approx([2, 4]), "torch": pytest.approx([3, 3]), "floor": pytest.approx([1, 2])
    }  # fmt: skip
    assert fig.axes[0].get_title() == "64 → 32"
    fig = gpu.plot_attention(record(), heads=8)
    assert [ax.get_title() for ax in fig.axes] == ["prefix 1,024", "prefix 8,192"]
    assert lines(fig.axes[1])["native"] == pytest.approx([8.192, 65.536])


def test_bookkeeping_with_and_without_published_figures():
    fig = gpu.plot_bookkeeping(record(), {64: 1e-3})
    heights = [[bar.get_height() for bar in bars] for bars in fig.axes[0].containers]
    assert heights[0] == pytest.approx([64, 256]) and heights[1] == pytest.approx([640, 2560])
    assert heights[2][0] == pytest.approx(1000) and math.isnan(heights[2][1])
    assert len(gpu.plot_bookkeeping(record()).axes[0].containers) == 2


def test_counts_keep_contender_and_params():
    params = {"what": "linear", "cases": 3, "rows": 40, "changed_rows": 0}
    counted = Result("invariance/native", "row", (40.0,), params)
    other = Result("invariance_total/native", "row", (40.0,), {"rows": 40})
    kept = Record("x", "d", "c", {}, "k", (counted, other), Path("g.json"))
    assert gpu.counts(kept, "invariance") == [{"contender": "native", **params}]
    with pytest.raises(ValueError, match="g.json: expected results of invariance_tokens"):
        gpu.counts(kept, "invariance_tokens")


def test_tokens_per_second():
    rates = gpu.tokens_per_s(record(), "bfloat16")
    assert rates == {
        "eager torch, AR": pytest.approx(500), "torch in a CUDA graph, AR": pytest.approx(2000),
        "engine, AR": pytest.approx(4000), "engine, DDTree by NGram": pytest.approx(200 / 0.04),
    }  # fmt: skip
    fig = gpu.plot_tokens_per_s(record())
    assert [bar.get_width() for bar in fig.axes[1].patches] == pytest.approx(list(rates.values()))
    empty = Record("x", "d", "c", {}, "k", (), Path("g.json"))
    with pytest.raises(ValueError, match="expected ar_step or ngram_ddtree in float32"):
        gpu.tokens_per_s(empty)


@pytest.mark.parametrize(
    "draw",
    [lambda r: gpu.plot_linear(r, [(64, 32)]), lambda r: gpu.plot_attention(r, 8), gpu.plot_bookkeeping,
     gpu.plot_tokens_per_s],
)  # fmt: skip
def test_every_figure_says_where_its_numbers_come_from(draw):
    fig = draw(record())
    fig.canvas.draw()
    for part in ("Some GPU", "2026-12-01", "torch 2.11", "kdtree-nb bench"):
        assert part in fig.get_supxlabel()
