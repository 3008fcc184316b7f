"""Draw how many tokens each verify step yielded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kdtree_nb.viz.theme import BLUE, CYCLE, GREY, MARKERS, ORANGE, figure


def draw_acceptance(stats: Any) -> Figure:
    """Draw tokens per verify step: accepted nodes plus the one token that the target gives for free.

    stats: a GenerationStats (anything with accepted_per_step, list[int]): step by step on the left, how often on the
    right. Or a mapping name -> stats: the cumulative number of tokens over the steps, a line each.
    """
    if isinstance(stats, Mapping):
        fig, ax = figure()
        _draw_progress(ax, {name: _accepted(value) for name, value in stats.items()})
        return fig
    accepted = _accepted(stats)
    fig, (left, right) = figure(columns=2)
    _draw_steps(left, accepted)
    _draw_histogram(right, accepted)
    return fig


def _accepted(stats: Any) -> list[int]:
    accepted = [int(a) for a in stats.accepted_per_step]
    if not accepted:
        raise ValueError("draw_acceptance: expected at least one verify step, got none")
    return accepted


def _draw_steps(ax: Axes, accepted: list[int]) -> None:
    steps = range(1, len(accepted) + 1)
    ax.bar(steps, accepted, color=BLUE, label="accepted from the tree")
    ax.bar(
        steps, [1] * len(accepted), bottom=accepted, color=ORANGE, hatch="///", edgecolor=GREY, label="from the target"
    )
    mean = 1 + sum(accepted) / len(accepted)
    ax.axhline(mean, color=GREY, linestyle="--", label=f"mean {mean:.2f}")
    ax.set(xlabel="verify step", ylabel="tokens", ylim=(0, 1.45 * (max(accepted) + 1)))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.legend(loc="upper left", fontsize=7)


def _draw_histogram(ax: Axes, accepted: list[int]) -> None:
    counts = Counter(a + 1 for a in accepted)
    values = range(1, max(counts) + 1)
    ax.bar(values, [counts[v] for v in values], color=BLUE)
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set(xlabel="tokens per step", ylabel="number of steps")


def _draw_progress(ax: Axes, accepted: Mapping[str, list[int]]) -> None:
    for index, (name, steps) in enumerate(accepted.items()):
        totals = [0]
        for value in steps:
            totals.append(totals[-1] + value + 1)
        colour, marker = CYCLE[index % len(CYCLE)], MARKERS[index % len(MARKERS)]
        ax.plot(range(len(totals)), totals, color=colour, marker=marker, markersize=3, label=name)
    ax.set(xlabel="target forwards", ylabel="tokens generated")
    ax.legend()
