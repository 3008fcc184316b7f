"""Draw which keys each tree node attends to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from kdtree_nb.viz.theme import BLUE, GREY, ORANGE, figure
from kdtree_nb.viz.tree import readable


def draw_mask(
    tree: Any, stream: int = 0, *, prefix_len: int = 0, decode: Callable[[list[int]], str] | None = None
) -> Figure:
    """Draw the attention mask of one stream: a row per query node, a filled square per key that it sees.

    tree: DraftTree, or anything with its fields token, parent, num_nodes. prefix_len: when positive, a block of four
    columns on the left stands for the prefix, which every node sees. decode: labels instead of node indices.
    """
    count = int(tree.num_nodes[stream])
    seen = _visibility([int(p) for p in tree.parent[stream][:count]])
    prefix = 4 if prefix_len else 0
    pixels = np.zeros((count, prefix + count, 4))
    pixels[:, :prefix] = to_rgba(ORANGE)
    pixels[:, prefix:][seen] = to_rgba(BLUE)
    side = min(6.0, max(3.0, 0.24 * count + 1.0))
    fig, ax = figure(width=side * (prefix + count) / count, height=side)
    ax.imshow(pixels, interpolation="nearest", extent=(-prefix - 0.5, count - 0.5, count - 0.5, -0.5))
    _label_axes(ax, [int(t) for t in tree.token[stream][:count]], decode)
    if prefix:
        ax.text(-prefix / 2 - 0.5, -0.8, f"prefix\n({prefix_len} keys)", ha="center", va="bottom", fontsize=8)
    ax.set(xlabel="key: tree node", ylabel="query: tree node")
    return fig


def _visibility(parents: list[int]) -> np.ndarray:
    """bool [n, n]: row i sees itself and its ancestors."""
    seen = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


def _label_axes(ax: Any, tokens: list[int], decode: Callable[[list[int]], str] | None) -> None:
    count = len(tokens)
    step = 1 if count <= 40 else 2 ** int(np.ceil(np.log2(count / 20)))
    ticks = list(range(0, count, step))
    labels = [str(t) for t in ticks] if decode is None else [readable(decode([tokens[t]])) for t in ticks]
    ax.set_xticks(ticks, labels, fontsize=7)
    ax.set_yticks(ticks, labels, fontsize=7)
    if count <= 40:
        ax.set_xticks(np.arange(-0.5, count), minor=True)
        ax.set_yticks(np.arange(-0.5, count), minor=True)
        ax.grid(which="minor", color=GREY, alpha=0.3, linewidth=0.5)
        ax.tick_params(which="minor", length=0)
    ax.grid(False, which="major")
