"""How a benchmark is taken: contenders by turns, one raw sample each per round, so that drift hits all alike."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from tqdm.auto import tqdm

from kdtree_nb.errors import KdtreeError

MIN_SAMPLE_S = 2e-3
"""A sample lasts at least about this long: a short call is repeated inside it."""

Sample = Callable[[], float]
"""Takes one sample: does the work and returns seconds."""


class BenchmarkError(KdtreeError):
    """Contenders that should compute the same do not, so their times must not be compared."""


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much work a run may do.

    num_rounds: samples per contender
    num_tokens: length of a generation
    every:      of a list of sizes, every how manieth is measured
    num_cases:  random cases where something is counted
    """

    num_rounds: int = 15
    num_tokens: int = 256
    every: int = 1
    num_cases: int = 1200

    def some(self, sizes: Sequence[Any]) -> Sequence[Any]:
        """Those of `sizes` that are measured; the first is one of them."""
        return sizes[:: self.every]

    @classmethod
    def quick(cls) -> Effort:
        """Enough to see that everything runs, in seconds; too little to publish."""
        return cls(num_rounds=3, num_tokens=32, every=4, num_cases=40)


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Raw samples of one contender. name: `<group>/<contender>`; params tell equal names apart."""

    name: str
    samples: Sequence[float]
    params: Mapping[str, Any]
    unit: str = "s"

    @property
    def median(self) -> float:
        """Median of the raw samples, in `unit`."""
        return statistics.median(self.samples)

    @property
    def is_sound(self) -> bool:
        """Whether a record can hold it: there are samples, all positive and finite."""
        return bool(self.samples) and all(math.isfinite(s) and s > 0 for s in self.samples)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, as a record holds it."""
        return {
            "name": self.name, "unit": self.unit, "params": dict(self.params), "samples": list(self.samples)
        }  # fmt: skip


Group = Callable[[Effort], Iterable[Measurement]]
"""Measures. One that yields what it has measured as it goes loses nothing of it where it fails or is interrupted."""


def rate(measured: Measurement, amount: int, unit: str, noun: str) -> Measurement:
    """Seconds turned into `amount` of `noun` per second."""
    return Measurement(measured.name, [amount / s for s in measured.samples], {**measured.params, noun: amount}, unit)


def per_call(function: Callable[[], object]) -> Sample:
    """Samples seconds per call of `function`, over as many calls as the first sample found to last long enough."""
    num_calls = 0

    def sample() -> float:
        nonlocal num_calls
        if not num_calls:
            function()
            num_calls = max(1, math.ceil(MIN_SAMPLE_S / min(clock(function) for _ in range(3))))
        return clock(function, num_calls)

    return sample


def once(function: Callable[[], object]) -> Sample:
    """Samples seconds of a single call."""
    return lambda: clock(function)


def clock(function: Callable[[], object], num_calls: int = 1) -> float:
    """Wall seconds per call, as in use: the garbage collector runs."""
    start = time.perf_counter()
    for _ in range(num_calls):
        function()
    return (time.perf_counter() - start) / num_calls


def compete(
    group: str, contenders: Mapping[str, Sample], num_rounds: int, params: Mapping[str, Any] | None = None
) -> list[Measurement]:
    """One unrecorded round, then `num_rounds` rounds in which each contender is sampled once, every other round in the
    opposite order: nobody always comes behind the same neighbour."""
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders)
    for round_index in range(-1, num_rounds):
        for name in order:
            seconds = contenders[name]()
            if round_index >= 0:
                samples[name].append(seconds)
        order.reverse()
    return [Measurement(f"{group}/{name}", taken, params or {}) for name, taken in samples.items()]


@dataclasses.dataclass(frozen=True)
class Failure:
    """A group that gave no measurements, and why."""

    group: str
    reason: str


def run_groups(
    groups: Mapping[str, Group], effort: Effort, show_progress: bool = True, failures: list[Failure] | None = None,
    after_group: Callable[[list[Measurement]], object] = lambda results: None, goes_on: bool = True,
) -> list[Measurement]:  # fmt: skip
    """Run the groups one after the other, in inference mode. Raises BenchmarkError when contenders disagree.

    With a list of `failures` a group that raises is added to it, with the reason, and the next one runs if the run
    goes_on; Ctrl-C is added too, and ends the run. after_group is called with all measurements so far, those of a group
    that raised among them, to keep them whatever comes later. A measurement without samples, or with one that is no
    positive finite number, is left out, as no record could be read with it: it is a failure.
    """
    results: list[Measurement] = []
    progress = tqdm(groups.items(), desc="bench", unit="group", disable=not show_progress)
    for name, group in progress:
        progress.set_postfix_str(name)
        measured: list[Measurement] = []
        try:
            with torch.inference_mode():
                for measurement in group(effort):
                    measured.append(measurement)
                    results += [measurement] if measurement.is_sound else []
            expect_sound(measured)
        except BaseException as error:
            if failures is not None:
                failures.append(Failure(name, f"{type(error).__name__}: {error}"))
            if failures is None or not goes_on or not isinstance(error, Exception):
                after_group(results)
                raise
        after_group(results)
    return results


def expect_sound(measured: Sequence[Measurement]) -> None:
    """Raises BenchmarkError that names the measurements of which a record could not be read."""
    bad = [f"{list(m.samples)} of {m.name} with {dict(m.params)}" for m in measured if not m.is_sound]
    if bad:
        raise BenchmarkError(f"bench: expected samples that are positive finite numbers, got {'; '.join(bad)}")


def require(agree: bool, group: str, what: str) -> None:
    """Check before you time. Raises BenchmarkError unless `agree`."""
    if not agree:
        raise BenchmarkError(f"bench: {group}: expected all contenders to agree on {what}, got a difference")
