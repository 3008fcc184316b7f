"""What a record must show, by kind of device, and by how much it does."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kdtree_nb.bench.runner import Measurement

Cell = Mapping[str, Measurement]
"""Contender -> measurement, of one group and with equal params."""

Figure = Callable[[Cell], float | None]
"""What a target is about, computed from a cell; None where the cell lacks a contender."""


@dataclasses.dataclass(frozen=True)
class Target:
    """In every cell of `group` whose params `applies` accepts, `figure` is to be at least, or at most, `bound`.

    device: cpu or cuda, the kind whose records are judged by it
    unit:   of figure and bound, for people
    open:   why the committed record does not reach it, empty if it does
    """

    device: str
    group: str
    claim: str
    figure: Figure
    bound: float
    at_least: bool = True
    unit: str = "x"
    applies: Callable[[Mapping[str, Any]], bool] = lambda params: True
    open: str = ""

    def met_by(self, got: float) -> bool:
        """Whether this figure reaches the bound; NaN does not."""
        return got >= self.bound if self.at_least else got <= self.bound


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A target and what was found: the worst figure, the params of its cell, cells judged, and those that reach it."""

    target: Target
    got: float
    params: Mapping[str, Any]
    num_cells: int
    num_met: int

    @property
    def met(self) -> bool:
        """Whether every cell reaches it."""
        return self.num_met == self.num_cells


def times_faster(contender: str, *baselines: str) -> Figure:
    """Median of the fastest of `baselines` over the median of `contender`."""

    def figure(cell: Cell) -> float | None:
        slow = [cell[name].median for name in baselines if name in cell]
        return min(slow) / cell[contender].median if slow and contender in cell else None

    return figure


def microseconds(contender: str) -> Figure:
    """Median of `contender`."""
    return lambda cell: cell[contender].median * 1e6 if contender in cell else None


def times_floor(contender: str) -> Figure:
    """Median of `contender` over the time below which the device cannot go."""
    return lambda cell: cell[contender].median / cell[contender].params["floor_s"] if contender in cell else None


def teraflops(contender: str) -> Figure:
    """Operations that `contender` does per second, in 10^12."""
    return lambda cell: cell[contender].params["flops"] / cell[contender].median / 1e12 if contender in cell else None


def param(contender: str, name: str) -> Figure:
    """A count that `contender` has among its params."""
    return lambda cell: float(cell[contender].params[name]) if contender in cell else None


def cells(measurements: Iterable[Measurement], group: str) -> list[Cell]:
    """The cells of a group, in order of measurement."""
    found: dict[str, dict[str, Measurement]] = {}
    for m in measurements:
        of_group, _, contender = m.name.partition("/")
        if of_group == group:
            found.setdefault(str(dict(m.params)), {}).setdefault(contender, m)
    return list(found.values())


def judge(targets: Iterable[Target], measurements: Sequence[Measurement]) -> list[Verdict]:
    """A verdict on each target of which something was measured. Raises ValueError for params that are not a group's."""
    verdicts = []
    for target in targets:
        figures = []
        for cell in cells(measurements, target.group):
            params = next(iter(cell.values())).params
            got = _figure(target, cell, params)
            if got is not None:
                figures.append((got, params))
        if figures:
            worst, params = min(figures, key=lambda f: _badness(target, f[0]))
            num_met = sum(target.met_by(got) for got, _ in figures)
            verdicts.append(Verdict(target, worst, params, len(figures), num_met))
    return verdicts


def _figure(target: Target, cell: Cell, params: Mapping[str, Any]) -> float | None:
    """What the target finds in a cell, if it is about it. Raises ValueError for params that it cannot be judged by."""
    try:
        return target.figure(cell) if target.applies(params) else None
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise ValueError(
            f"judge: {target.group}: expected params by which {target.claim!r} can be judged, got {dict(params)}"
        ) from error


def _badness(target: Target, got: float) -> float:
    if math.isnan(got):
        return -math.inf
    return got if target.at_least else -got


def ratio(
    measurements: Sequence[Measurement], group: str, baseline: str, contender: str,
    params: Mapping[str, Any] | None = None,
) -> float | None:  # fmt: skip
    """Median of `baseline` over median of `contender`, both with `params` if given; None where either is missing."""

    def median(name: str) -> float | None:
        fits = (m for m in measurements if m.name == f"{group}/{name}" and (params is None or m.params == params))
        return next((m.median for m in fits), None)

    slow, fast = median(baseline), median(contender)
    return None if slow is None or fast is None else slow / fast


def markdown_table(verdicts: Iterable[Verdict]) -> str:
    """A row per target: claim, bound, the worst figure and where it was found, and whether every cell reaches it."""
    lines = ["| target | bound | found | where it is worst | reached |", "| --- | --- | --- | --- | --- |"]
    for v in verdicts:
        t, sign = v.target, "≥" if v.target.at_least else "≤"
        where = ", ".join(f"{k} {p}" for k, p in v.params.items() if k in _SHOWN)
        reached = f"{v.num_met} of {v.num_cells}" if v.met else f"**missed** ({v.num_met} of {v.num_cells}) {t.open}"
        lines.append(
            f"| {t.claim} | {sign} {_shown(t.bound)} {t.unit} | {_shown(v.got)} | {where} | {reached.strip()} |"
        )
    return "\n".join(lines) + "\n"


def _shown(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


_SHOWN = ("model", "part", "M", "N", "K", "dtype", "heads", "rows", "prefix_len", "budget", "streams", "what",
          "prompt_tokens")  # fmt: skip
