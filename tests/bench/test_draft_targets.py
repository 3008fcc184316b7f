"""What records of `evaluate` are judged by: the fastest fixed budget, auto beside it, calibration at every budget."""

from __future__ import annotations

import pytest

from kdtree_nb.bench import Measurement, judge
from kdtree_nb.bench.draft_targets import DRAFT_TARGETS

SWEEP = {"model": "nano-k2", "set": "code", "drafter": "DFlash"}


def judged(measurements: list[Measurement]) -> dict[str, tuple[float, bool]]:
    return {v.target.claim: (v.got, v.met) for v in judge(DRAFT_TARGETS, measurements)}


def sweep(**seconds: float) -> dict[str, tuple[float, bool]]:
    return judged([Measurement(f"budget_sweep/{name.replace('_', ' ')}", [s], SWEEP) for name, s in seconds.items()])


def test_the_fastest_fixed_budget_is_compared():
    found = sweep(AR=6.0, chain=2.4, tree_16=2.0, tree_64=2.2, tree_auto=2.5)
    assert found["the best tree against the chain, on code"] == (pytest.approx(1.2), True)
    assert found["the best tree against AR, on code"] == (pytest.approx(3.0), True)
    assert found["auto against the best fixed budget, each set"] == (pytest.approx(0.8), False)
    assert sweep(AR=6.0, chain=2.4, tree_auto=2.5) == {}


def test_few_prompts_are_not_judged():
    params = {"model": "nano-k2", "set": "code", "num_texts": 256, "budget": 64, "tau_less_repetitive": 5.4,
              "expected": 5.2, "accepted": 5.0}  # fmt: skip
    found = judged([Measurement("acceptance/DFlash", [6.2], params)])
    assert found["tokens per forward on held-out code, budget 64"] == (6.2, True)
    assert found["tokens per forward on held-out code, budget 64, less repetitive half"] == (5.4, False)
    assert found["expected against accepted tokens on code, every budget"] == (pytest.approx(4.0), False)
    assert judged([Measurement("acceptance/DFlash", [6.2], params | {"num_texts": 32})]) == {}
    assert judged([Measurement("acceptance/prompt lookup", [6.2], params)]) == {}
