"""Curves of training runs from their records."""

from __future__ import annotations

import json
import math

import pytest

from kdtree_nb import viz
from kdtree_nb.viz.training import bytes_per_token, smooth


@pytest.fixture
def record(tmp_path):
    steps = range(1, 31)
    record = {
        "train_curve": [{"step": s, "nats_per_token": 8 * math.exp(-s / 10)} for s in steps],
        "heldout_curve": [
            {"step": s, "bits_per_byte": 3 - s / 15, "min_load": s / 30, "max_load": 2 - s / 30} for s in (10, 20, 30)
        ],
        "corpus": {"streams": {"train": {"num_bytes": 300, "num_tokens": 100}}},
    }
    (tmp_path / "training.json").write_text(json.dumps(record))
    return viz.load_training(tmp_path)


def test_losses_are_drawn_in_bits_per_byte(record):
    fig = viz.plot_training({"run": record}, width=1)
    line, dots = fig.axes[0].lines
    assert line.get_xdata().tolist() == list(range(1, 31))
    nats = [y * math.log(2) * 3 for y in line.get_ydata()]
    assert nats == pytest.approx([p["nats_per_token"] for p in record["train_curve"]])
    assert dots.get_ydata().tolist() == [p["bits_per_byte"] for p in record["heldout_curve"]]
    assert bytes_per_token(record) == 3


def test_runs_have_their_own_colours(record):
    fig = viz.plot_training({"a": record, "b": record}, log_x=True)
    colours = [line.get_color() for line in fig.axes[0].lines]
    assert colours[0] == colours[1] != colours[2] == colours[3] and fig.axes[0].get_xscale() == "log"


def test_expert_load(record):
    fig = viz.plot_expert_load(record)
    busiest, idlest = fig.axes[0].lines[:2]
    assert busiest.get_ydata()[-1] == pytest.approx(1.0) and idlest.get_ydata()[0] == pytest.approx(1 / 3)


def test_smooth_is_a_running_mean():
    assert smooth([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]


def test_records_without_curves_are_refused(tmp_path):
    (tmp_path / "training.json").write_text("{}")
    with pytest.raises(ValueError, match="expected a record with a train_curve, got none"):
        viz.load_training(tmp_path)
    with pytest.raises(ValueError, match="expected at least one run, got none"):
        viz.plot_training({})


def test_a_line_for_each_depth():
    curve = [{"step": s, "nats_per_token": 1.0, "by_depth": [1 / s, None if s == 1 else 2 / s]} for s in (1, 2, 3)]
    ax = viz.plot_depths({"train_curve": curve}, depths=(1, 2, 8)).axes[0]
    first, second = ax.get_lines()
    assert list(first.get_ydata()) == [1.0, 1 / 2, 1 / 3] and list(second.get_xdata()) == [2, 3]
    assert [line.get_label() for line in ax.get_lines()] == ["depth 1", "depth 2"]
