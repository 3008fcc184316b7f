"""What a record holds by budget: figures of acceptance, and tokens per second, step times and experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from kdtree_nb.viz.budget import AR
from kdtree_nb.viz.records import Record, Result, number
from kdtree_nb.viz.theme import CYCLE, GREY, figure

HATCHES = ("", "///", "...", "xxx")
_WAYS = {"AR": AR, "chain": "chain", "chain auto": "chain auto", "tree auto": "auto"}


def by_budget(record: Record, name: str, field: str | None = None, **params: Any) -> dict[int | str, float]:
    """Of the results of that name whose params include `params`: budget -> their figure, or another field of theirs.

    Raises ValueError where the record has none, or two for one budget, or one without that field.
    """
    found: dict[int | str, float] = {}
    for result in record.results:
        if result.name != name or "budget" not in result.params or not params.items() <= result.params.items():
            continue
        budget = result.params["budget"]
        if not isinstance(budget, int | str) or not (field is None or field in result.params):
            got = dict(result.params)
            raise ValueError(f"by_budget: {record.path.name}: {name}: expected a budget and {field!r}, got {got}")
        if budget in found:
            raise ValueError(f"by_budget: {record.path.name}: {name}: expected one result at {budget}, got several")
        found[budget] = result.median if field is None else result.params[field]
    if not found:
        raise ValueError(f"by_budget: {record.path.name}: expected results of {name} with {params}, got none")
    return found


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Decoding the same texts in several ways, by budget or as "AR", "chain", "chain auto" and "auto".

    tokens_per_s: without the prefill; tau: tokens per target forward; step_s: seconds of a step, drafting included
    """

    tokens_per_s: dict[int | str, float]
    tau: dict[int | str, float]

    @property
    def step_s(self) -> dict[int | str, float]:
        """Seconds of a step."""
        return {way: self.tau[way] / rate for way, rate in self.tokens_per_s.items()}

    @property
    def speedup(self) -> dict[int | str, float]:
        """Over AR decoding."""
        return {way: rate / self.tokens_per_s[AR] for way, rate in self.tokens_per_s.items()}

    @property
    def efficiency(self) -> dict[int | str, float]:
        """Speedup over tau: the time of a step of AR over that of a step."""
        return {way: speedup / self.tau[way] for way, speedup in self.speedup.items()}


def sweep(record: Record, group: str = "budget_sweep", **params: Any) -> Sweep:
    """The ways to decode that `group` measured with these params. Raises ValueError where there is none."""
    rates, tau = {}, {}
    for result in record.results:
        of_group, _, way = result.name.partition("/")
        if of_group not in (group, f"{group}_tau") or not params.items() <= result.params.items():
            continue
        found, key = rates if of_group == group else tau, _key(way)
        if key is None:
            known = ", ".join(_WAYS)
            raise ValueError(f"sweep: {record.path.name}: expected {known} or `tree` and a budget, got {result.name}")
        if key in found:
            raise ValueError(f"sweep: {record.path.name}: {result.name}: expected one result with {params}, got more")
        found[key] = _rate(result) if found is rates else result.median
    if AR not in rates or rates.keys() != tau.keys():
        raise ValueError(f"sweep: {record.path.name}: expected {group} and its tau with {params}, got {sorted(rates)}")
    return Sweep(rates, tau)


def coverage_by_rows(record: Record, contender: str, **params: Any) -> dict[int, tuple[float, ...]]:
    """Rows of a step -> distinct experts of each layer. Raises ValueError where the record has none."""
    wanted = f"expert_coverage/{contender}"
    found = {
        number(r, "rows"): r.samples for r in record.results if r.name == wanted and params.items() <= r.params.items()
    }
    if not found:
        raise ValueError(f"coverage_by_rows: {record.path.name}: expected {wanted} with {params}, got none")
    return found


def plot_breakdown(parts: Mapping[str, Mapping[str, float]], y_label: str = "milliseconds per step") -> Figure:
    """A stacked bar for each way to decode: way -> part of a step -> seconds."""
    if not parts:
        raise ValueError("plot_breakdown: expected at least one way to decode, got none")
    fig, ax = figure()
    bottom = dict.fromkeys(parts, 0.0)
    names = list(dict.fromkeys(name for part in parts.values() for name in part))
    for index, name in enumerate(names):
        heights = {way: 1e3 * part.get(name, 0.0) for way, part in parts.items()}
        style = {"color": CYCLE[index % len(CYCLE)], "hatch": HATCHES[index % len(HATCHES)], "edgecolor": GREY}
        ax.bar(list(parts), list(heights.values()), 0.62, bottom=list(bottom.values()), label=name, **style)
        bottom = {way: bottom[way] + heights[way] for way in parts}
    ax.set(ylabel=y_label)
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
    ax.grid(False, axis="x")
    return fig


def _key(way: str) -> int | str | None:
    budget = way.removeprefix("tree ")
    return _WAYS.get(way, int(budget) if budget.isdecimal() else None)


def _rate(result: Result) -> float:
    return number(result, "num_texts") * number(result, "num_tokens") / result.median
