"""Figures from the record of a GPU, and the numbers in them for captions: an operation, its peers and the floor."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from kdtree_nb.viz.records import Record, Result
from kdtree_nb.viz.theme import BLUE, CYCLE, GREY, LINE_STYLES, MARKERS, figure

FLOOR = "floor"
_STEPS = {
    "eager torch": "eager torch, AR",
    "torch graph": "torch in a CUDA graph, AR",
    "native without graphs": "engine without graphs, AR",
    "native": "engine, AR",
}
_RUNS = {"DDTree": "engine, DDTree by NGram", "DDTree SkipGram": "engine, DDTree by SkipGram"}


@dataclasses.dataclass(frozen=True)
class Series:
    """Medians of a group's contenders over one param.

    x:       values of the param, ascending
    seconds: contender -> seconds per call at each x, NaN where it was not measured
    floor_s: seconds below which the device cannot go, at each x; None where the record has no floors
    """

    x: tuple[float, ...]
    seconds: Mapping[str, tuple[float, ...]]
    floor_s: tuple[float, ...] | None

    def times_faster(self, contender: str, baseline: str) -> tuple[float, ...]:
        """How many times less time `contender` takes than `baseline`, at each x."""
        return tuple(b / c for b, c in zip(self.seconds[baseline], self.seconds[contender], strict=True))

    def times_floor(self, contender: str) -> tuple[float, ...]:
        """Time over floor at each x. Raises ValueError where the record has no floors."""
        if self.floor_s is None:
            raise ValueError(f"Series.times_floor: {contender!r}: expected measurements with floor_s, got none")
        return tuple(c / f for c, f in zip(self.seconds[contender], self.floor_s, strict=True))


def series(record: Record, group: str, x: str, **params: Any) -> Series:
    """The medians of `group` over the param `x`, the other params being `params`.

    Raises ValueError where the record has none, or several at one x.
    """
    found: dict[str, dict[float, Result]] = {}
    for result in record.results:
        of_group, _, contender = result.name.partition("/")
        if of_group != group or x not in result.params or not params.items() <= result.params.items():
            continue
        at = found.setdefault(contender, {})
        if result.params[x] in at:
            both = [dict(result.params), dict(at[result.params[x]].params)]
            raise ValueError(f"series: {record.path.name}: {result.name}: expected one result at {x}, got {both}")
        at[result.params[x]] = result
    if not found:
        raise ValueError(f"series: {record.path.name}: expected results of {group} with {x} and {params}, got none")
    places = sorted({value for at in found.values() for value in at})
    seconds = {c: tuple(at[v].median if v in at else float("nan") for v in places) for c, at in found.items()}
    floors = {v: r.params.get("floor_s") for at in found.values() for v, r in at.items()}
    has_floors = all(f is not None for f in floors.values())
    return Series(tuple(places), seconds, tuple(floors[v] for v in places) if has_floors else None)


def plot_series(
    record: Record, group: str, x: str, x_label: str, cells: Mapping[str, Mapping[str, Any]],
    contenders: Sequence[str] | None = None,
) -> Figure:  # fmt: skip
    """Microseconds of an operation, its peers and the floor over the param `x`, one panel for each title of `cells`.

    cells: title -> the other params; contenders: which to draw, by default all.
    """
    fig, axes = figure(width=max(4.5, 2.9 * len(cells)), columns=len(cells))
    for ax, (title, params) in zip(axes if len(cells) > 1 else [axes], cells.items(), strict=True):
        found = series(record, group, x, **params)
        _draw_lines(ax, found, contenders or list(found.seconds))
        ax.set(title=title, xlabel=x_label)
    first = axes[0] if len(cells) > 1 else axes
    first.set_ylabel("µs per call")
    first.legend(fontsize=8)
    return _signed(fig, record)


def _draw_lines(ax: Axes, found: Series, contenders: Sequence[str]) -> None:
    for index, name in enumerate(n for n in contenders if n in found.seconds):
        style = {"marker": MARKERS[index], "linestyle": LINE_STYLES[index], "color": CYCLE[index]}
        ax.plot(found.x, [s * 1e6 for s in found.seconds[name]], markersize=4, label=name, **style)
    if found.floor_s:
        ax.plot(found.x, [s * 1e6 for s in found.floor_s], color=GREY, linestyle=":", label=FLOOR)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def plot_linear(record: Record, shapes: Sequence[tuple[int, int]], dtype: str = "bfloat16") -> Figure:
    """linear beside cuBLAS and the floor over the number of rows, for weights of shapes (K, N)."""
    cells = {f"{K} → {N}": {"K": K, "N": N, "dtype": dtype} for K, N in shapes}
    return plot_series(record, "linear", "M", "rows", cells, ("native", "torch"))


def plot_attention(record: Record, heads: int) -> Figure:
    """verify_attn beside materialised torch and the floor over the number of tree nodes, for each prefix length."""
    contenders = ("native", "torch masked", "torch lean")
    prefixes = sorted({r.params["prefix_len"] for r in record.results if r.name == "verify_attn_sweep/native"})
    cells = {f"prefix {p:,}": {"prefix_len": p, "heads": heads} for p in prefixes}
    return plot_series(record, "verify_attn_sweep", "rows", "tree nodes", cells, contenders)


def plot_bookkeeping(record: Record, published_s: Mapping[int, float] | None = None) -> Figure:
    """Bars of a step without its forwards, by budget: ours, our rendering of the published pipeline, and the published
    code's own figures (budget -> seconds)."""
    found = series(record, "bookkeeping", "budget")
    bars = {"native": found.seconds["native"], "published pipeline, as rendered here": found.seconds["published"]}
    if published_s:
        bars["published code"] = tuple(published_s.get(int(b), float("nan")) for b in found.x)
    fig, ax = figure()
    width = 0.8 / len(bars)
    for index, (name, seconds) in enumerate(bars.items()):
        places = [i + (index - (len(bars) - 1) / 2) * width for i in range(len(found.x))]
        drawn = ax.bar(places, [s * 1e6 for s in seconds], 0.9 * width, color=CYCLE[index], label=name)
        ax.bar_label(drawn, fmt="{:,.0f}", fontsize=7, color=GREY)
    ax.set_xticks(range(len(found.x)), [f"{b:g}" for b in found.x])
    ax.set(xlabel="budget", ylabel="µs", yscale="log")
    ax.legend(fontsize=8)
    ax.grid(False, axis="x")
    return _signed(fig, record)


def counts(record: Record, group: str) -> list[dict[str, Any]]:
    """What a group counted: its measurements' params, and `contender`. Raises ValueError where the record has none.

    Groups `invariance` (rows of trees against the same rows one by one: what, dtype, cases, rows, changed_rows) and
    `invariance_tokens` (model, dtype, texts, rows, changed_rows, changed_choices, tokens, changed_tokens,
    changed_texts); contenders `native` and `torch`.
    """
    named = [(r.name.partition("/"), r.params) for r in record.results]
    found = [{"contender": name[2], **params} for name, params in named if name[0] == group]
    if not found:
        raise ValueError(f"counts: {record.path.name}: expected results of {group}, got none")
    return found


def tokens_per_s(record: Record, dtype: str = "float32") -> dict[str, float]:
    """Tokens per second of one stream of tiny: AR steps of the contenders, and DDTree over whole calls."""
    suffix = "" if dtype == "float32" else "_bf16"
    rates = {}
    for contender, label in _STEPS.items():
        step = record.find(f"ar_step{suffix}/{contender}")
        if step:
            rates[label] = 1 / step.median
    for contender, label in _RUNS.items():
        of_prompts = [r for r in record.results if r.name == f"ngram_ddtree{suffix}_prompt/{contender}"]
        if of_prompts:
            num_tokens = sum(r.params["num_tokens"] for r in of_prompts)
            rates[label] = num_tokens / sum(r.median for r in of_prompts)
    if not rates:
        raise ValueError(f"tokens_per_s: {record.path.name}: expected ar_step or ngram_ddtree in {dtype}, got none")
    return rates


def plot_tokens_per_s(record: Record, dtypes: Sequence[str] = ("float32", "bfloat16")) -> Figure:
    """Bars of `tokens_per_s`, one panel for each dtype."""
    fig, axes = figure(height=2.6, columns=len(dtypes))
    for ax, dtype in zip(axes if len(dtypes) > 1 else [axes], dtypes, strict=True):
        rates = tokens_per_s(record, dtype)
        drawn = ax.barh(list(rates), list(rates.values()), color=BLUE)
        ax.bar_label(drawn, fmt="{:,.0f}", padding=3, fontsize=8, color=GREY)
        ax.set(title=dtype, xlabel="tokens per second", xlim=(0, 1.2 * max(rates.values())))
        ax.invert_yaxis()
        ax.grid(False, axis="y")
        if ax is not (axes[0] if len(dtypes) > 1 else axes):
            ax.set_yticklabels([])
    return _signed(fig, record)


def _signed(fig: Figure, record: Record) -> Figure:
    """Say below where the numbers come from."""
    fig.supxlabel(f"{record.label}\n{record.command}", fontsize=6, x=0.01, ha="left")
    return fig
