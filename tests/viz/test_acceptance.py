"""Acceptance plots show accepted nodes plus one token of the target per step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kdtree_nb import viz


def test_bars_are_the_steps_and_the_mean_counts_the_targets_token():
    fig = viz.draw_acceptance(SimpleNamespace(accepted_per_step=[3, 0, 1]))
    steps, histogram = fig.axes
    assert [bar.get_height() for bar in steps.containers[0]] == [3, 0, 1]
    assert [bar.get_y() for bar in steps.containers[1]] == [3, 0, 1]
    assert steps.get_lines()[0].get_ydata()[0] == pytest.approx(7 / 3)
    assert [bar.get_height() for bar in histogram.containers[0]] == [1, 1, 0, 1]


def test_progress_of_several_runs_accumulates():
    stats = {"tree": SimpleNamespace(accepted_per_step=[3, 1]), "AR": SimpleNamespace(accepted_per_step=[0, 0, 0])}
    lines = viz.draw_acceptance(stats).axes[0].get_lines()
    assert [list(line.get_ydata()) for line in lines] == [[0, 4, 6], [0, 1, 2, 3]]


def test_nothing_to_draw_is_an_error():
    with pytest.raises(ValueError, match="at least one verify step"):
        viz.draw_acceptance(SimpleNamespace(accepted_per_step=[]))
