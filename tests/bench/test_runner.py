"""How samples are taken: by turns, after a warm-up, per call; and that disagreement stops a benchmark."""

from __future__ import annotations

import time

import pytest
import torch

from kdtree_nb.bench import BenchmarkError, Effort, run_groups
from kdtree_nb.bench.runner import Failure, Measurement, clock, compete, once, per_call, require


def test_contenders_take_turns_and_the_first_round_is_not_kept():
    order, values = [], iter(range(1, 100))

    def contender(name):
        return lambda: (order.append(name), float(next(values)))[1]

    found = compete("g", {"a": contender("a"), "b": contender("b")}, 3, {"n": 1})
    assert order == ["a", "b", "b", "a"] * 2
    assert [(m.name, m.samples, m.params, m.unit) for m in found] == [
        ("g/a", [4.0, 5.0, 8.0], {"n": 1}, "s"),
        ("g/b", [3.0, 6.0, 7.0], {"n": 1}, "s"),
    ]


def test_seconds_per_call():
    calls = []
    assert 0.01 <= clock(lambda: time.sleep(0.01), 2) < 0.2
    assert 0.01 <= once(lambda: (calls.append(1), time.sleep(0.01)))() < 0.2 and calls == [1]


def test_a_short_call_is_repeated_within_a_sample():
    calls = []
    sample = per_call(lambda: calls.append(None))
    sample()
    before = len(calls)
    assert 0 < sample() < 1e-3
    assert len(calls) - before > 100


def test_groups_run_in_order_in_inference_mode():
    seen = []

    def group(name):
        return lambda effort: [
            seen.append((name, effort.num_rounds, torch.is_inference_mode_enabled()))
            or Measurement(f"{name}/x", [1.0], {})
        ]

    found = run_groups({"a": group("a"), "b": group("b")}, Effort(2, 8), show_progress=False)
    assert [m.name for m in found] == ["a/x", "b/x"] and seen == [("a", 2, True), ("b", 2, True)]


def test_contenders_must_agree():
    require(True, "g", "the sum")
    with pytest.raises(BenchmarkError, match="bench: g: expected all contenders to agree on the sum"):
        require(False, "g", "the sum")


@pytest.mark.parametrize("bad", [[], [0.0], [1.0, float("nan")], [float("inf")], [-1.0]])
def test_what_no_record_can_hold_is_a_failure_and_the_rest_is_kept(bad):
    kept, failures = [], []
    groups = {
        "a": lambda effort: [Measurement("a/x", [1.0], {}), Measurement("a/y", bad, {"rows": 3})],
        "b": lambda effort: [Measurement("b/x", [2.0], {})],
    }
    found = run_groups(groups, Effort(2, 8), False, failures, lambda results: kept.append(len(results)))
    assert [m.name for m in found] == ["a/x", "b/x"] and kept == [1, 2]
    (failure,) = failures
    assert isinstance(failure, Failure) and failure.group == "a"
    assert f"positive finite numbers, got {bad} of a/y with {{'rows': 3}}" in failure.reason
    with pytest.raises(BenchmarkError, match="positive finite numbers"):
        run_groups(groups, Effort(2, 8), False)


@pytest.mark.parametrize("error", [RuntimeError("no room"), KeyboardInterrupt()])
def test_what_a_group_measured_before_it_failed_is_kept(error):
    def group(effort):
        yield Measurement("a/x", [float(torch.is_inference_mode_enabled())], {})
        raise error

    kept, failures = [], []
    groups = {"a": group, "b": lambda effort: [Measurement("b/x", [2.0], {})]}

    def keep(results):
        kept.append([m.name for m in results])

    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            run_groups(groups, Effort(2, 8), False, failures, keep)
        assert kept == [["a/x"]]
    else:
        assert [m.name for m in run_groups(groups, Effort(2, 8), False, failures, keep)] == ["a/x", "b/x"]
        assert kept == [["a/x"], ["a/x", "b/x"]]
    assert failures == [Failure("a", f"{type(error).__name__}: {error}")]
    kept.clear()
    with pytest.raises(type(error)):
        run_groups(groups, Effort(2, 8), False, failures, keep, goes_on=False)
    assert kept == [["a/x"]] and len(failures) == 2
    kept.clear()
    with pytest.raises(type(error)):
        run_groups(groups, Effort(2, 8), False, None, keep)
    assert kept == [["a/x"]]
