"""How large should the tree be: tokens per forward, tokens per second and experts against its size, the best marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from kdtree_nb.viz.theme import CYCLE, GREY, MARKERS, RED, figure

CHAIN, AUTO, AR = "chain", "auto", "AR"

LEVELS = {CHAIN: 6.0, AUTO: 3.0, AR: 1.0}
"""Length of a level's dashes. Where levels of several names coincide, each is seen in the gaps of the others."""

ByBudget = Mapping[int | str, float]
"""A figure by budget; under "chain", "auto" and "AR" that of another way to decode, drawn as a level."""


def best_budget(values: ByBudget) -> int:
    """The budget of the largest figure; of equal ones the smallest. Raises ValueError where there is no budget."""
    budgets = _budgets(values)
    return max(budgets, key=lambda budget: (values[budget], -budget))


def plot_by_budget(series: Mapping[str, ByBudget], y_label: str, mark_best: bool = False) -> Figure:
    """A line over the budgets for each name, and levels for the chain, the chosen budget and AR where they are given.

    mark_best: a star on the best budget of each line.
    """
    fig, ax = figure()
    for index, (name, values) in enumerate(series.items()):
        budgets, colour = _budgets(values), CYCLE[index % len(CYCLE)]
        ax.plot(
            budgets, [values[b] for b in budgets], color=colour, marker=MARKERS[index % len(MARKERS)], markersize=4,
            label=name,
        )  # fmt: skip
        for level, dash in LEVELS.items():
            if level in values:
                style = index * dash, (dash, dash * max(1, len(series) - 1))
                ax.axhline(values[level], color=colour, linestyle=style, linewidth=1.2, label=f"{name}, {level}")
        if mark_best:
            best = best_budget(values)
            ax.plot([best], [values[best]], color=RED, marker="*", markersize=13, linestyle="none")
    _log_ticks(ax, sorted({b for values in series.values() for b in _budgets(values)}))
    ax.set(xlabel="budget: drafted nodes per step", ylabel=y_label)
    ax.set_ylim(bottom=0)
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
    return fig


def plot_choice(expected: Sequence[float], seconds: Sequence[float]) -> Figure:
    """How a step's budget is chosen: expected tokens and seconds over the nodes on the left, their ratio on the right.

    expected, seconds: of trees of 0, 1, 2 … nodes besides the root. The best is marked.
    """
    if len(expected) != len(seconds) or len(expected) < 2:
        raise ValueError(f"plot_choice: expected 2 or more values of each, got {len(expected)} and {len(seconds)}")
    fig, (left, right) = figure(columns=2)
    nodes = range(len(expected))
    (tokens,) = left.plot(nodes, expected, color=CYCLE[0], label="expected tokens")
    left.set(xlabel="drafted nodes", ylabel="expected tokens")
    time = left.twinx()
    (cost,) = time.plot(nodes, [s * 1e3 for s in seconds], color=CYCLE[1], linestyle="--", label="milliseconds")
    time.set_ylabel("milliseconds")
    for ax in (left, time):
        ax.set_ylim(bottom=0)
    time.grid(False)
    left.legend(handles=[tokens, cost], fontsize=8)
    rate = [e / s for e, s in zip(expected, seconds, strict=True)]
    best = max(nodes, key=lambda n: (rate[n], -n))
    right.plot(nodes, rate, color=CYCLE[2])
    right.plot(
        [best], [rate[best]], color=RED, marker="*", markersize=13, linestyle="none", label=f"best: {best} nodes"
    )
    right.set(xlabel="drafted nodes", ylabel="expected tokens per second")
    right.set_ylim(bottom=0)
    right.legend(fontsize=8)
    return fig


def plot_coverage(
    by_rows: Mapping[str, Mapping[int, Sequence[float]]], num_experts: int, random: Mapping[int, float] | None = None
) -> Figure:
    """Distinct experts over the rows of a step: for each name the mean over the layers and their range.

    by_rows: name -> rows -> distinct experts of each layer; random: what rows that choose at random would wake.
    """
    fig, ax = figure()
    for index, (name, found) in enumerate(by_rows.items()):
        rows, colour = sorted(found), CYCLE[index % len(CYCLE)]
        means = [sum(found[r]) / len(found[r]) for r in rows]
        ax.plot(rows, means, color=colour, marker=MARKERS[index % len(MARKERS)], markersize=4, label=name)
        ax.fill_between(rows, [min(found[r]) for r in rows], [max(found[r]) for r in rows], color=colour, alpha=0.18)
    if random:
        ax.plot(sorted(random), [random[r] for r in sorted(random)], color=GREY, linestyle="--", label="at random")
    ax.axhline(num_experts, color=GREY, linestyle=":", linewidth=1.2, label=f"all {num_experts}")
    _log_ticks(ax, sorted({r for found in by_rows.values() for r in found}))
    ax.set(xlabel="rows of a step", ylabel="distinct experts of a layer")
    ax.set_ylim(bottom=0)
    ax.legend(fontsize=8)
    return fig


def _budgets(values: ByBudget) -> list[int]:
    found = sorted(key for key in values if not isinstance(key, str))
    if not found:
        raise ValueError(f"plot_by_budget: expected a figure for at least one budget, got {list(values)}")
    return found


def _log_ticks(ax: Axes, values: Sequence[int]) -> None:
    """A logarithmic axis with a tick at each value."""
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(list(values)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
