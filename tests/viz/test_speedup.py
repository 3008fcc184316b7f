"""Speedup plots: ratios of medians, a bar per record that has both sides, labelled with where it comes from."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from kdtree_nb import viz
from kdtree_nb.viz import Record, Result


def record(device: str, **samples: list[float]) -> Record:
    results = tuple(Result(f"step/{name}", "s", tuple(s), {"rows": 1}) for name, s in samples.items())
    return Record(device, "2026-12-01", "abc", {"torch": "2.13.0"}, "kdtree-nb bench", results, Path("x.json"))


LIVE = {"numpy": [4.0, 4.0, 4.0], "native": [2.0, 1.0, 2.0]}


def ratios(fig) -> list[float]:
    return [patch.get_width() for patch in fig.axes[0].patches]


def notes(fig) -> str:
    return fig.get_supxlabel()


def test_live_and_recorded_bars_stand_side_by_side():
    records = [record("H200", numpy=[9.0], native=[3.0]), record("other", numpy=[1.0])]
    fig = viz.plot_speedup(LIVE, baseline="numpy", records=records, group="step", params={"rows": 1})
    assert ratios(fig) == [2.0, 3.0]
    ticks = [tick.get_text() for tick in fig.axes[0].get_yticklabels()]
    assert ticks == ["native, now", "native, recorded [1]"]
    for part in ("H200", "2026-12-01", "torch 2.13.0", "kdtree-nb bench", viz.device_label()):
        assert part in notes(fig)
    assert "other" not in notes(fig)


def test_recorded_bars_are_hatched_and_live_ones_filled():
    fig = viz.plot_speedup(LIVE, baseline="numpy", records=[record("a", numpy=[2.0], native=[1.0])], group="step")
    assert [patch.get_hatch() for patch in fig.axes[0].patches] == [None, "////"]


def test_records_of_other_params_are_left_out():
    records = [record("a", numpy=[2.0], native=[1.0])]
    fig = viz.plot_speedup(LIVE, baseline="numpy", records=records, group="step", params={"rows": 17})
    assert len(ratios(fig)) == 1


def test_every_contender_has_a_bar():
    fig = viz.plot_speedup(LIVE | {"eager": [8.0, 8.0, 8.0]}, baseline="numpy")
    assert ratios(fig) == [2.0, 0.5]


@pytest.mark.parametrize("live", [{}, {"numpy": [1.0]}, {"native": [1.0], "x": [1.0]}])
def test_a_baseline_and_a_contender_are_needed(live):
    with pytest.raises(ValueError, match="expected samples of 'numpy' and of a contender"):
        viz.plot_speedup(live, baseline="numpy")


def test_long_labels_and_commands_are_cut_at_words():
    """Nothing leaves the figure, and no word is lost."""
    command = "kdtree-nb evaluate " + " ".join(f"--option-{i} {i}" for i in range(40))
    kept = record("H200", numpy=[9.0], **{"a contender whose name is long": [3.0]})
    kept = dataclasses.replace(kept, command=command)
    live = {"numpy": [4.0], "a contender whose name is long": [2.0]}
    fig = viz.plot_speedup(live, baseline="numpy", records=[kept], group="step")
    assert notes(fig).split()[-82:] == command.split()
    ticks = [tick.get_text() for tick in fig.axes[0].get_yticklabels()]
    assert ticks[1].split() == "a contender whose name is long, recorded [1]".split() and "\n" in ticks[1]
    fig.draw_without_rendering()
    for text in (fig._supxlabel, *fig.axes[0].get_yticklabels()):
        box = text.get_window_extent()
        assert 0 <= box.x0 and box.x1 <= fig.bbox.width
