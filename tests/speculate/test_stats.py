from __future__ import annotations

import math
import time

import pytest

from kdtree_nb.speculate.stats import GenerationStats, timed


class Machine:
    def __init__(self):
        self.seconds = {"work": 0.0}

    @timed("work")
    def sleep(self, seconds):
        """Sleeps."""
        time.sleep(seconds)
        return seconds

    @timed("work")
    def fail(self):
        time.sleep(0.01)
        raise RuntimeError("no")


def test_time_adds_up_and_results_pass_through():
    machine = Machine()
    assert machine.sleep(0.01) == 0.01
    first = machine.seconds["work"]
    machine.sleep(0.01)
    assert machine.seconds["work"] >= first + 0.01 >= 0.02
    assert Machine.sleep.__doc__ == "Sleeps."


def test_time_before_an_exception_counts():
    machine = Machine()
    with pytest.raises(RuntimeError):
        machine.fail()
    assert machine.seconds["work"] >= 0.01


def test_tokens_per_step():
    assert math.isnan(GenerationStats().tokens_per_step)
    stats = GenerationStats(accepted_per_step=[1, 0], nodes_per_step=[3, 1], num_tokens=3)
    assert stats.num_target_forwards == 2 and stats.tokens_per_step == 1.5
