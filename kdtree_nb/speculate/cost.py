"""CostModel: seconds of a step by its rows, piecewise linear between measured points.

The points are measured on the device with the model itself (`speculate.measure_cost`), so that what a further row costs
(in a mixture of experts, the experts that it wakes) is in them.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from kdtree_nb.errors import CalibrationError

NEVER_S = 1e30
"""Seconds of a step of fewer rows than streams, which there is not. Finite, so that one can interpolate."""


@dataclasses.dataclass(frozen=True)
class CostKey:
    """What measured times hold for. Any other value means to measure again.

    device: name of the hardware, on a CPU with the number of threads
    dtype:  of weights and activations
    kind:   who leads a step: "host", or "device" (CUDA graphs)
    shape:  digest of the model's configuration and of its tensors' shapes
    model:  digest of the weights
    build:  of the kernels: sources, compiler, torch, CPU features
    """

    device: str
    dtype: str
    kind: str
    shape: str
    model: str
    build: str


@dataclasses.dataclass(frozen=True)
class Surface:
    """Seconds of a target forward over the trees of `num_streams` streams, with everything that is captured with it.

    num_slots: tree slots per stream that the step was captured with; 0 where it takes as many as it needs
    num_rows:  [R] ascending rows of all streams together; before the first, seconds are those of the first
    seconds:   [P][R], a row for each prefix length of the cost model
    """

    num_slots: int
    num_streams: int
    num_rows: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]


@dataclasses.dataclass(frozen=True)
class Overhead:
    """Seconds of drafting and bookkeeping in a step of `num_streams` streams, beside what a Surface holds.

    num_slots: tree slots per stream of the captured step that drafts; 0 where the host drafts
    seconds:   [P], one for each prefix length of the cost model
    cut_s:     seconds that it takes besides to cut the trees inside the captured step
    """

    num_slots: int
    num_streams: int
    seconds: tuple[float, ...]
    cut_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Measured surfaces and, for each drafter, what a step takes besides and what its trees are like.

    max_budget: largest tree of a stream that was measured
    prefix_len: [P] ascending tokens in the cache, per stream
    overhead:   drafter and mode -> by slots and streams
    typical:    drafter and mode -> mean probability of node 0, 1, … of its trees, the root's first
    """

    key: CostKey
    max_budget: int
    prefix_len: tuple[int, ...]
    surfaces: tuple[Surface, ...]
    overhead: Mapping[str, tuple[Overhead, ...]] = dataclasses.field(default_factory=dict)
    typical: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(self)

    @property
    def slot_sizes(self) -> list[int]:
        """Captured slots per stream that were measured, ascending; [0] where a step takes what it needs."""
        return sorted({s.num_slots for s in self.surfaces})

    def table(
        self, num_streams: int, largest: int, num_slots: int = 0, overhead_s: float | np.ndarray = 0.0
    ) -> np.ndarray:
        """Seconds f64 [P, largest + 1] of steps of 0 … `largest` rows; NEVER_S below num_streams rows.

        Between measured numbers of streams, and of rows, linear; beyond the last of either as between the last two, and
        not below the last: noise must not make a step free.
        num_slots:  of the smallest capture that was measured and holds as many
        overhead_s: added to each, one number or f64 [P]
        """
        measured = [s for s in self.surfaces if s.num_slots == self._slots(num_slots)]
        low, high, weight = _between(sorted(s.num_streams for s in measured), num_streams)
        drafted = np.arange(largest + 1 - num_streams)
        at = {s.num_streams: s for s in measured}
        values = blend(_spread(at[low], drafted), _spread(at[high], drafted), weight)
        head = np.full((len(self.prefix_len), min(num_streams, largest + 1)), NEVER_S)
        return np.concatenate([head, values + np.reshape(overhead_s, (-1, 1))], axis=1)

    def seconds(
        self, num_streams: int, prefix_len: float, num_rows: int, num_slots: int | None = None,
        drafter: str | None = None,
    ) -> float:  # fmt: skip
        """Seconds of one step; prefix_len is the mean over the streams.

        num_slots: of the captured step; default: as many as the rows need
        drafter:   what it takes besides is counted, too
        """
        slots = -(-num_rows // num_streams) if num_slots is None else num_slots
        besides = 0.0 if drafter is None else self.overhead_s(drafter, num_streams, slots)
        table = self.table(num_streams, num_rows, slots, besides)
        first, weight = prefix_weight(self.prefix_len, prefix_len)
        last = min(first + 1, len(self.prefix_len) - 1)
        return float(blend(table[first, num_rows], table[last, num_rows], weight))

    def overhead_s(self, drafter: str, num_streams: int, num_slots: int = 0) -> np.ndarray:
        """Seconds f64 [P] that a step takes besides the forward. Raises CalibrationError for a drafter not measured."""
        low, high, weight = self._overhead(drafter, num_streams, num_slots)
        values = (1 - weight) * np.array(low.seconds) + weight * np.array(high.seconds)
        return np.maximum(values, 0.0)

    def cut_s(self, drafter: str, num_streams: int, num_slots: int = 0) -> float:
        """Seconds that cutting takes inside a captured step. Raises CalibrationError for a drafter not measured."""
        low, high, weight = self._overhead(drafter, num_streams, num_slots)
        return max(0.0, (1 - weight) * low.cut_s + weight * high.cut_s)

    def _overhead(self, drafter: str, num_streams: int, num_slots: int) -> tuple[Overhead, Overhead, float]:
        """The two that were measured around num_streams, and the weight of the upper one."""
        if drafter not in self.overhead:
            raise CalibrationError(
                f'budget="auto": expected a drafter that was measured with this model ({", ".join(self.overhead)}), '
                f"got {drafter}; run kdtree-nb calibrate with it (--drafter), or kdtree_nb.speculate.calibrate"
            )
        known = self.overhead[drafter]
        slots = _at_least({o.num_slots for o in known}, num_slots)
        at = {o.num_streams: o for o in known if o.num_slots == slots}
        low, high, weight = _between(sorted(at), num_streams)
        return at[low], at[high], weight

    def useful_budget(
        self, num_streams: int, depth: int, overhead_s: float | np.ndarray, num_slots: int = 0
    ) -> int:  # fmt: skip
        """Most drafted nodes that can pay, however good the drafter: a step emits at most 1 + depth tokens a stream.

        With more nodes than that a step takes longer than 1 + depth steps that draft nothing.
        """
        table = self.table(num_streams, num_streams + self.max_budget, num_slots, overhead_s)[:, num_streams:]
        pays = (table <= (1 + depth) * table[:, :1]).any(axis=0)
        return int(np.flatnonzero(pays).max())

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Any) -> CostModel:
        """From the fields of `to_dict` after JSON. Raises CalibrationError on anything else."""
        try:
            surfaces = tuple(
                Surface(s["num_slots"], s["num_streams"], tuple(s["num_rows"]), tuple(map(tuple, s["seconds"])))
                for s in fields["surfaces"]
            )
            overhead = {
                name: tuple(Overhead(o["num_slots"], o["num_streams"], tuple(o["seconds"]), o["cut_s"]) for o in at)
                for name, at in fields["overhead"].items()
            }
            typical = {name: tuple(values) for name, values in fields["typical"].items()}
            key = CostKey(**fields["key"])
            return cls(key, fields["max_budget"], tuple(fields["prefix_len"]), surfaces, overhead, typical)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise CalibrationError(
                f"cost model: expected its fields, got {type(error).__name__}: {error}; run kdtree-nb calibrate again"
            ) from error

    def _slots(self, num_slots: int) -> int:
        return _at_least(self.slot_sizes, num_slots)


def _at_least(sizes: Collection[int], wanted: int) -> int:
    """The smallest of `sizes` that is at least `wanted`; the largest, where none is."""
    return min((size for size in sizes if size >= wanted), default=max(sizes))


def prefix_weight(knots: Sequence[int], prefix_len: float) -> tuple[int, float]:
    """(i, w) so that the value at `prefix_len` is (1 - w) values[i] + w values[i + 1]; w is above 1 behind the last."""
    if len(knots) == 1 or prefix_len <= knots[0]:
        return 0, 0.0
    first = min(bisect.bisect_right(knots, prefix_len) - 1, len(knots) - 2)
    return first, (prefix_len - knots[first]) / (knots[first + 1] - knots[first])


def blend(low: np.ndarray, high: np.ndarray, weight: float) -> np.ndarray:
    """(1 - weight) of low and `weight` of high; with a weight above 1, beyond the last point, at least `high`."""
    values = (1 - weight) * low + weight * high
    return np.maximum(values, high) if weight > 1 else values


def _between(counts: Sequence[int], wanted: int) -> tuple[int, int, float]:
    """The measured counts around `wanted`, and the weight of the upper one: above 1 behind the last, 0 before all."""
    first, weight = prefix_weight(counts, wanted)
    return counts[first], counts[min(first + 1, len(counts) - 1)], weight


def _spread(surface: Surface, drafted: np.ndarray) -> np.ndarray:
    """Seconds f64 [P, len(drafted)] at these numbers of drafted nodes, all streams together."""
    x = np.array(surface.num_rows, dtype=np.float64) - surface.num_streams
    rows = []
    for y in np.array(surface.seconds, dtype=np.float64):
        values = np.interp(drafted, x, y)
        if len(x) > 1:
            slope = max(0.0, (y[-1] - y[-2]) / (x[-1] - x[-2]))
            values += slope * np.maximum(drafted - x[-1], 0)
        rows.append(values)
    return np.array(rows)


def _check(model: CostModel) -> None:
    """Raises CalibrationError unless the surfaces are complete and every time is positive."""

    def require(ok: bool, expected: str, got: Any) -> None:
        if not ok:
            raise CalibrationError(f"cost model: expected {expected}, got {got!r}; run kdtree-nb calibrate again")

    require(_are_counts([model.max_budget], 1, 1023), "a max_budget of 1 … 1023", model.max_budget)
    require(_are_counts(model.prefix_len) and _ascends(model.prefix_len), "ascending prefix lengths", model.prefix_len)
    require(bool(model.surfaces), "at least one surface", model.surfaces)
    places = [(s.num_slots, s.num_streams) for s in model.surfaces]
    require(len(set(places)) == len(places), "one surface for each number of slots and of streams", places)
    for s in model.surfaces:
        place = s.num_slots, s.num_streams
        require(_are_counts(place) and s.num_streams > 0, "integers as numbers of slots and of streams", place)
        require(_are_counts(s.num_rows), "integers as numbers of rows", s.num_rows)
        require(_ascends(s.num_rows) and s.num_rows[0] >= s.num_streams, "a root for every stream", s.num_rows)
        sizes = [len(s.seconds), *(len(row) for row in s.seconds)]
        want = [len(model.prefix_len)] + [len(s.num_rows)] * len(model.prefix_len)
        require(sizes == want, f"seconds of sizes {want}", sizes)
        require(all(_is_time(t) for row in s.seconds for t in row), "positive finite seconds", s.seconds)
    for name, at in model.overhead.items():
        is_good = len(at) > 0 and all(_is_overhead(o, len(model.prefix_len)) for o in at)
        require(is_good, f"seconds for {name} by slots and streams", at)
    for name, values in model.typical.items():
        is_good = len(values) > 0 and all(value == 0 or _is_time(value) for value in values)
        require(is_good and max(values) <= 1, f"probabilities for {name}", values)


def _is_overhead(o: Overhead, num_prefixes: int) -> bool:
    is_place = _are_counts([o.num_slots]) and _are_counts([o.num_streams], 1) and len(o.seconds) == num_prefixes
    return is_place and all(t == 0 or _is_time(t) for t in (*o.seconds, o.cut_s))


def _are_counts(values: Sequence[Any], smallest: int = 0, largest: int = 2**31 - 1) -> bool:
    return all(isinstance(v, int) and not isinstance(v, bool) and smallest <= v <= largest for v in values)


def _ascends(values: Sequence[int]) -> bool:
    return len(values) > 0 and all(a < b for a, b in zip(values, values[1:], strict=False))


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
