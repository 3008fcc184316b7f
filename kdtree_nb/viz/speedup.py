"""Plot ratios measured in this run beside recorded ones."""

from __future__ import annotations

import dataclasses
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from kdtree_nb.native.devices import device_label
from kdtree_nb.viz.records import Record
from kdtree_nb.viz.theme import BLUE, GREY, ORANGE, figure

NOTE_WIDTH, LABEL_WIDTH = 110, 24
"""Characters of a line below the figure, and of one beside a bar."""

_INDENT = " " * 6


@dataclasses.dataclass(frozen=True)
class Bar:
    """A ratio of medians; low and high span the middle half of the per-round ratios."""

    label: str
    ratio: float
    low: float
    high: float
    live: bool


def plot_speedup(
    live: Mapping[str, Sequence[float]],
    *,
    baseline: str,
    records: Sequence[Record] = (),
    group: str | None = None,
    params: Mapping[str, Any] | None = None,
    device: str = "cpu",
) -> Figure:
    """Bars: how many times faster than `baseline` each other contender is, live and recorded.

    live: raw samples in seconds from `compare`. records: those that hold `<group>/<name>` of baseline and contender
    (with `params`, where given) in time units get a hatched bar each, and a line that says device, date, versions and
    command. A bar is the ratio of medians; its whisker spans the middle half of the per-round ratios.
    """
    if baseline not in live or len(live) < 2:
        raise ValueError(f"plot_speedup: expected samples of {baseline!r} and of a contender, got {sorted(live)}")
    bars, notes = [], []
    for name in (n for n in live if n != baseline):
        bars.append(ratio_bar(live[baseline], live[name], f"{name}, now", live=True))
        for number, record in enumerate(records if group else (), start=1):
            pair = [record.find(f"{group}/{n}", **(params or {})) for n in (baseline, name)]
            if None in pair:
                continue
            bars.append(ratio_bar(pair[0].samples, pair[1].samples, f"{name}, recorded [{number}]"))
            notes.append(f"[{number}] {record.label}\n{record.command}")
    return _draw(bars, [f"now: {device_label(device)}", *dict.fromkeys(notes)], baseline)


def ratio_bar(slow: Sequence[float], fast: Sequence[float], label: str = "", live: bool = False) -> Bar:
    """How many times less time `fast` takes than `slow`, from raw samples of interleaved rounds."""
    ratio = statistics.median(slow) / statistics.median(fast)
    rounds = [a / b for a, b in zip(slow, fast, strict=False)]
    low, high = ratio, ratio
    if len(rounds) >= 2:
        quarters = statistics.quantiles(rounds, n=4, method="inclusive")
        low, high = min(quarters[0], ratio), max(quarters[2], ratio)
    return Bar(label, ratio, low, high, live)


def _wrapped(note: str) -> str:
    """A note with its lines cut at words to the figure's width; what goes on is indented like a command."""
    lines = [textwrap.fill(line, NOTE_WIDTH, subsequent_indent=_INDENT) for line in note.split("\n")]
    return "\n".join([lines[0], *(textwrap.indent(line, _INDENT) for line in lines[1:])])


def _draw(bars: list[Bar], notes: list[str], baseline: str) -> Figure:
    notes = [_wrapped(note) for note in notes]
    labels = [textwrap.fill(bar.label, LABEL_WIDTH) for bar in bars]
    lines = sum(note.count("\n") + 1 for note in notes)
    fig, ax = figure(height=0.75 + sum(max(0.42, 0.2 * (1 + label.count("\n"))) for label in labels) + 0.16 * lines)
    for row, bar in enumerate(bars):
        style = {"color": BLUE} if bar.live else {"color": "none", "edgecolor": ORANGE, "hatch": "////"}
        ax.barh(row, bar.ratio, height=0.62, **style)
        ax.errorbar(bar.ratio, row, xerr=[[bar.ratio - bar.low], [bar.high - bar.ratio]], color=GREY, capsize=3)
        ax.annotate(f"{bar.ratio:.2f}×", (bar.high, row), (6, 0), textcoords="offset points", va="center")
    ax.axvline(1.0, color=GREY, linestyle="--", linewidth=1)
    ax.set_yticks(range(len(bars)), labels)
    ax.set(
        xlabel=f"times faster than {baseline} (longer is better)", xlim=(0, 1.18 * max(1.0, *(b.high for b in bars)))
    )
    ax.invert_yaxis()
    ax.grid(False, axis="y")
    fig.supxlabel("\n".join(notes), fontsize=7, x=0.01, ha="left")
    return fig
