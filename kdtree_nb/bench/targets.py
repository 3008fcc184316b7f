"""What a record must show, and by how much it does."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from kdtree_nb.bench.runner import Measurement


@dataclasses.dataclass(frozen=True)
class Target:
    """In `group`, `contender` is to take at most 1 / at_least of the time of `baseline`."""

    group: str
    baseline: str
    contender: str
    at_least: float
    claim: str


TARGETS = (
    Target("ar_step", "numpy", "native", 3.0, "an AR step is at least 3x faster than the numpy reference"),
    Target("ar_step", "eager torch", "native", 3.0, "an AR step is at least 3x faster than eager torch"),
    Target("verify_rows", "4 AR steps", "one 17-row verify", 1.0, "a 17-row verify costs at most 4 AR steps"),
    Target("tree_build", "heapq", "native", 20.0, "tree_build is at least 20x faster than Python's heapq"),
    Target("ngram_ddtree", "AR", "DDTree", 1.0, "NGram DDTree is faster than AR on repetitive text"),
)


def ratio(
    measurements: Sequence[Measurement], group: str, baseline: str, contender: str,
    params: Mapping[str, Any] | None = None,
) -> float | None:  # fmt: skip
    """Median of `baseline` over median of `contender`, both with `params` if given; None where either is missing."""

    def median(name: str) -> float | None:
        fits = (m for m in measurements if m.name == f"{group}/{name}" and (params is None or m.params == params))
        return next((statistics.median(m.samples) for m in fits), None)

    slow, fast = median(baseline), median(contender)
    return None if slow is None or fast is None else slow / fast


def missed_targets(measurements: Sequence[Measurement]) -> list[tuple[Target, float]]:
    """The targets that these measurements miss, each with the ratio found. What was not measured does not count."""
    found = ((t, ratio(measurements, t.group, t.baseline, t.contender)) for t in TARGETS)
    return [(target, got) for target, got in found if got is not None and not got >= target.at_least]
