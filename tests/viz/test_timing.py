"""Timing takes the samples asked for, in rounds, and scales short calls."""

from __future__ import annotations

import time

import pytest

from kdtree_nb import viz


def test_contenders_are_interleaved():
    order: list[str] = []

    def call(name: str):
        return lambda: (order.append(name), time.sleep(0.002))

    samples = viz.compare({"a": call("a"), "b": call("b")}, repeats=3, warm_up=1)
    assert {name: len(s) for name, s in samples.items()} == {"a": 3, "b": 3}
    assert order == ["a", "b"] + ["a", "b"] * 3


def test_a_sample_is_seconds_per_call_even_for_short_calls():
    calls = []
    samples = viz.measure(lambda: calls.append(None), repeats=3)
    assert len(calls) > 100
    assert 0 < max(samples) < 1e-3


def test_samples_measure_time():
    assert all(0.01 <= s < 0.5 for s in viz.measure(lambda: time.sleep(0.01), repeats=2, warm_up=1))


def test_speedup_is_the_ratio_of_medians():
    samples = {"slow": [4.0, 6.0, 100.0], "fast": [2.0, 1.0, 3.0]}
    assert viz.speedup(samples, "slow", "fast") == 3.0
    with pytest.raises(ValueError, match="got 'none'"):
        viz.speedup(samples, "slow", "none")


@pytest.mark.parametrize(("repeats", "warm_up"), [(0, 1), (1, 0)])
def test_impossible_counts(repeats: int, warm_up: int):
    with pytest.raises(ValueError, match="at least 1"):
        viz.measure(lambda: None, repeats, warm_up)
