"""Figures about the size of the tree show the figures they were given, and mark the best."""

from __future__ import annotations

import pytest

from kdtree_nb import viz

RATES = {"code": {8: 3.0, 16: 5.0, 64: 5.0, "chain": 4.0, "AR": 1.0}, "prose": {8: 2.0, 16: 1.5, "auto": 2.5}}


def stars(ax):
    return [(line.get_xdata()[0], line.get_ydata()[0]) for line in ax.get_lines() if line.get_marker() == "*"]


def test_a_line_for_each_set_and_levels_beside():
    ax = viz.plot_by_budget(RATES, "tokens per second", mark_best=True).axes[0]
    lines = {line.get_label(): line for line in ax.get_lines()}
    assert list(lines["code"].get_xdata()) == [8, 16, 64] and list(lines["code"].get_ydata()) == [3.0, 5.0, 5.0]
    assert lines["code, chain"].get_ydata()[0] == 4.0 and lines["prose, auto"].get_ydata()[0] == 2.5
    assert "prose, chain" not in lines and ax.get_ylim()[0] == 0
    assert stars(ax) == [(16, 5.0), (8, 2.0)]


def test_of_equal_budgets_the_smallest_is_best():
    assert viz.best_budget({4: 1.0, 2: 1.0, 8: 0.5, "chain": 9.0}) == 2
    with pytest.raises(ValueError, match="at least one budget"):
        viz.plot_by_budget({"none": {"chain": 1.0}}, "y")


def test_the_choice_is_the_best_ratio():
    fig = viz.plot_choice([1.0, 1.9, 2.5, 2.6], [1.0, 1.0, 1.25, 2.0])
    left, right, time = fig.axes
    assert list(left.get_lines()[0].get_ydata()) == [1.0, 1.9, 2.5, 2.6]
    assert list(time.get_lines()[0].get_ydata()) == [1000.0, 1000.0, 1250.0, 2000.0]
    assert stars(right) == [(2, 2.0)]
    with pytest.raises(ValueError, match="expected 2 or more values of each, got 1 and 2"):
        viz.plot_choice([1.0], [1.0, 2.0])


def test_coverage_shows_the_mean_the_range_and_chance():
    fig = viz.plot_coverage({"tree": {1: [2.0, 2.0], 5: [4.0, 6.0]}}, 8, {1: 2.0, 5: 5.5})
    mean, chance, every = fig.axes[0].get_lines()
    assert list(mean.get_ydata()) == [2.0, 5.0] and list(chance.get_ydata()) == [2.0, 5.5]
    assert every.get_ydata()[0] == 8
    (band,) = fig.axes[0].collections
    assert {tuple(point) for point in band.get_paths()[0].vertices} >= {(1, 2.0), (5, 4.0), (5, 6.0)}


def test_levels_of_two_names_that_coincide_are_both_seen():
    """One's dashes lie in the gaps of the other's."""
    ax = viz.plot_by_budget({"a": {8: 2.0, "chain": 1.0}, "b": {8: 3.0, "chain": 1.0}}, "y").axes[0]
    (first, dashes), (second, others) = (x._unscaled_dash_pattern for x in ax.lines if "chain" in x.get_label())
    assert tuple(dashes) == tuple(others) and dashes[0] == dashes[1] == second - first
