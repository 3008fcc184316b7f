"""Draw a draft tree: root on top, one row per depth, edges as wide as the prefix is probable."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kdtree_nb.viz.theme import BLUE, GREEN, GREY, figure

REJECTED = "#68727d"
_MAX_LABELLED_LEAVES = 48
_VISIBLE = {" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"}


def readable(text: str) -> str:
    """`text` with blanks and control characters made visible, for labels."""
    return "".join(_VISIBLE.get(c, c if c.isprintable() else f"\\x{ord(c):02x}") for c in text)


def draw_tree(
    tree: Any,
    stream: int = 0,
    *,
    decode: Callable[[list[int]], str] | None = None,
    accepted: Sequence[int] = (),
    show_index: bool = False,
    ax: Axes | None = None,
) -> Figure:
    """Draw the tree of one stream.

    tree: DraftTree, or anything with its fields token, parent, depth, log_prob, num_nodes. decode: turns [token] into
    text; without it labels are token ids. accepted: node indices of the accepted path (root and -1 fillers are
    ignored), drawn filled and with a heavy line. show_index: write node indices beside the nodes. ax: where to draw,
    instead of in a new figure.
    """
    count = int(tree.num_nodes[stream])
    parents = [int(p) for p in tree.parent[stream][:count]]
    depths = [int(d) for d in tree.depth[stream][:count]]
    masses = [math.exp(float(s)) for s in tree.log_prob[stream][:count]]
    labels = [_label(int(t), decode) for t in tree.token[stream][:count]]
    if _num_leaves(parents) > _MAX_LABELLED_LEAVES:
        labels = [" "] * count
    path = {0} | {int(i) for i in accepted if int(i) > 0}
    if max(path) >= count:
        raise ValueError(f"draw_tree: accepted: expected node indices below {count}, got {max(path)}")
    columns = _columns(parents)
    leaves = max(columns) + 1
    if ax is None:
        _, ax = figure(width=min(9.0, max(4.0, 0.42 * leaves + 1.2)), height=0.62 * (max(depths) + 1) + 0.4)
    _draw_edges(ax, parents, depths, columns, masses, path if accepted else set())
    _draw_nodes(ax, depths, columns, labels, path if accepted else set(), font=_font_size(leaves, labels))
    if show_index:
        for node in range(count):
            ax.annotate(str(node), (columns[node], -depths[node]), (7, 7), textcoords="offset points", fontsize=6)
    _finish(ax, max(depths), leaves)
    return ax.figure


def _finish(ax: Axes, max_depth: int, leaves: float) -> None:
    depths = range(max_depth + 1)
    ax.set(xlim=(-0.7, leaves - 0.3), ylim=(-max_depth - 0.45, 0.45), xticks=[], ylabel="depth")
    ax.set_yticks([-d for d in depths], [str(d) for d in depths])
    ax.spines[["left", "bottom"]].set_visible(False)
    ax.tick_params(length=0)
    ax.grid(False)


def _num_leaves(parents: list[int]) -> int:
    return len(set(range(len(parents))) - set(parents))


def _label(token: int, decode: Callable[[list[int]], str] | None) -> str:
    return str(token) if decode is None else readable(decode([token]))


def _columns(parents: list[int]) -> list[float]:
    """Horizontal place of every node: leaves side by side depth-first, parents above the middle of their children."""
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], start=1):
        children[parent].append(node)
    order, stack = [], [0]
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(reversed(children[node]))
    columns = [0.0] * len(parents)
    leaves = [node for node in order if not children[node]]
    for place, node in enumerate(leaves):
        columns[node] = float(place)
    for node in reversed(order):
        if children[node]:
            columns[node] = sum(columns[c] for c in children[node]) / len(children[node])
    return columns


def _font_size(leaves: float, labels: list[str]) -> float:
    widest = max(len(label) for label in labels)
    return max(4.0, min(9.0, 9.0 * 20 / max(leaves, 1.0), 9.0 * 6 / max(widest, 1)))


def _draw_edges(
    ax: Axes, parents: list[int], depths: list[int], columns: list[float], masses: list[float], path: set[int]
) -> None:
    for node, parent in enumerate(parents[1:], start=1):
        kept = node in path
        ax.plot(
            [columns[parent], columns[node]],
            [-depths[parent], -depths[node]],
            color=GREEN if kept else GREY,
            linewidth=3.5 if kept else 0.5 + 2.5 * masses[node],
            solid_capstyle="round",
            zorder=2 if kept else 1,
        )


def _draw_nodes(
    ax: Axes, depths: list[int], columns: list[float], labels: list[str], path: set[int], font: float
) -> None:
    for node, label in enumerate(labels):
        colour = GREEN if node in path else BLUE
        box = {"boxstyle": "round,pad=0.28", "facecolor": colour, "edgecolor": colour, "alpha": 1.0}
        if node not in path and path:  # rejected: plain type, thin edge
            box |= {"facecolor": REJECTED, "edgecolor": REJECTED}
        ax.text(
            columns[node],
            -depths[node],
            label,
            color="white",
            fontsize=font,
            fontweight="bold" if node in path else "normal",
            family="DejaVu Sans Mono",
            ha="center",
            va="center",
            bbox=box,
            zorder=3,
        )
