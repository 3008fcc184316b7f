"""One look for all figures: transparent, mid-grey axes, a palette that keeps its contrast on white and near-black."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import matplotlib
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kdtree_nb.native.cuda_toolchain import MIN_ARCH

GREY = "#808080"
BLUE = "#2d82d2"
ORANGE = "#cf6a0c"
GREEN = "#17905f"
RED = "#e0475b"
PURPLE = "#a162d8"
CYCLE = (BLUE, ORANGE, GREEN, PURPLE, RED, GREY)
"""Series colours in their order of use."""

MARKERS = ("o", "s", "^", "D", "v", "P")
LINE_STYLES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)))

_STYLE = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "savefig.transparent": True,
    "figure.figsize": (7.0, 3.4),
    "figure.dpi": 100,
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "text.color": GREY,
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "axes.titlecolor": GREY,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": matplotlib.cycler(color=CYCLE),
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GREY,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "legend.frameon": False,
    "legend.labelcolor": GREY,
    "lines.linewidth": 1.8,
    "hatch.linewidth": 0.8,
    "svg.hashsalt": "kdtree_nb",
}


def use_theme() -> None:
    """Set the book's matplotlib style for this process and, in a notebook, SVG output. Call it once, at the top."""
    matplotlib.rcParams.update(_STYLE)
    try:
        from IPython import get_ipython
        from matplotlib_inline.backend_inline import set_matplotlib_formats
    except ImportError:  # a plain script: the style alone
        return
    shell = get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        return
    shell.run_line_magic("matplotlib", "inline")
    matplotlib.rcParams.update(_STYLE)
    set_matplotlib_formats("svg", facecolor="none")
    formatter = shell.display_formatter.formatters["image/svg+xml"]
    formatter.for_type(Figure, _rendered_once(formatter.lookup_by_type(Figure)))


def _rendered_once(render: Callable[[Figure], str]) -> Callable[[Figure], str]:
    """A figure that a cell returns would be shown twice: as the cell's value and as an open figure. So close it."""

    def render_and_close(fig: Figure) -> str:
        picture = render(fig)
        plt.close(fig)
        return picture

    return render_and_close


def figure(width: float = 7.0, height: float = 3.4, columns: int = 1) -> tuple[Figure, Axes | Sequence[Axes]]:
    """A figure of width x height inches in the book's style: (figure, axes), with a row of axes when columns > 1."""
    with matplotlib.rc_context(_STYLE):
        return plt.subplots(1, columns, figsize=(width, height))


def plot_lines(
    x: Sequence[float],
    series: Mapping[str, Sequence[float]],
    *,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
) -> Figure:
    """Plot each series over x [n], told apart by colour, marker and dash, named at its right end.

    Raises ValueError when a series differs from x in length.
    """
    fig, ax = figure()
    for index, (name, values) in enumerate(series.items()):
        if len(values) != len(x):
            raise ValueError(f"plot_lines: series {name!r}: expected {len(x)} values, got {len(values)}")
        colour = CYCLE[index % len(CYCLE)]
        style = {"marker": MARKERS[index % len(MARKERS)], "linestyle": LINE_STYLES[index % len(LINE_STYLES)]}
        ax.plot(x, values, color=colour, markersize=4, label=name, **style)
    ax.set(xlabel=x_label, ylabel=y_label)
    if log_x:
        ax.set_xscale("log", base=2)
    if log_y:
        ax.set_yscale("log")
    if len(series) > 1:
        ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return fig


def device() -> str:
    """Where a chapter computes: "cuda" where torch sees a GPU that the kernels know, sm_90 or newer, else "cpu"."""
    if not torch.cuda.is_available():
        return "cpu"
    major, minor = torch.cuda.get_device_capability()
    return "cuda" if 10 * major + minor >= MIN_ARCH else "cpu"
