"""Targets: met, missed and not measured; on records that were committed they are met."""

from __future__ import annotations

import pytest

from kdtree_nb import bench, viz
from kdtree_nb.bench import Measurement, Target, missed_targets, ratio


def measured(numpy: float, native: float) -> list[Measurement]:
    return [Measurement("ar_step/numpy", [9.0, numpy, numpy], {}), Measurement("ar_step/native", [native], {})]


def test_ratio_of_medians():
    assert ratio(measured(6.0, 2.0), "ar_step", "numpy", "native") == 3.0
    assert ratio(measured(6.0, 2.0), "ar_step", "numpy", "none") is None
    both = [*measured(6.0, 2.0), Measurement("ar_step/native", [1.0], {"x": 1})]
    assert ratio(both, "ar_step", "numpy", "native", {"x": 1}) is None
    assert ratio(both, "ar_step", "numpy", "native", {}) == 3.0


def test_missed():
    assert missed_targets(measured(6.0, 2.0)) == []
    missed = missed_targets(measured(5.9, 2.0))
    assert [(target.baseline, got) for target, got in missed] == [("numpy", pytest.approx(2.95))]


def test_the_groups_of_targets_exist():
    assert {target.group for target in bench.TARGETS} <= set(bench.GROUPS)
    assert all(isinstance(target, Target) and target.at_least >= 1 for target in bench.TARGETS)


def test_committed_records_meet_the_targets():
    for found in viz.load_records():
        measurements = [Measurement(r.name, r.samples, r.params, r.unit) for r in found.results]
        assert not missed_targets(measurements), found.path.name
