"""The palette keeps its contrast on every page background; plots say what is wrong with their input."""

from __future__ import annotations

import nbformat
import pytest
import torch
from matplotlib.colors import to_rgb
from nbclient import NotebookClient

from kdtree_nb import viz
from kdtree_nb.viz import theme
from kdtree_nb.viz.tree import REJECTED

BACKGROUNDS = {"book light": "#ffffff", "book dark": "#121212", "JupyterLab dark": "#111111"}
MIN_CONTRAST = 3.0  # WCAG 2.1, 1.4.11: graphical objects


def luminance(colour: str) -> float:
    """Relative luminance as in WCAG 2.1."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_the_contrast_formula_has_its_known_extremes():
    assert contrast("white", "black") == pytest.approx(21.0)
    assert contrast("white", "white") == 1.0


@pytest.mark.parametrize("background", BACKGROUNDS)
@pytest.mark.parametrize("colour", theme.CYCLE)
def test_every_colour_shows_on_every_background(colour: str, background: str):
    assert contrast(colour, BACKGROUNDS[background]) >= MIN_CONTRAST


@pytest.mark.parametrize("fill", [theme.BLUE, theme.GREEN, REJECTED])
def test_white_labels_show_on_node_fills(fill: str):
    assert contrast("white", fill) >= MIN_CONTRAST


def test_figures_are_transparent():
    fig, ax = viz.figure()
    assert fig.get_facecolor()[3] == 0
    assert ax.get_facecolor()[3] == 0


def test_plot_lines_tells_series_apart_without_colour():
    fig = viz.plot_lines([1, 2], {"a": [1, 2], "b": [2, 1]}, x_label="x", y_label="y", log_x=True)
    lines = fig.axes[0].get_lines()
    assert len({line.get_marker() for line in lines}) == len({line.get_linestyle() for line in lines}) == 2
    assert fig.axes[0].get_xscale() == "log"
    with pytest.raises(ValueError, match="'a'.*expected 2 values, got 1"):
        viz.plot_lines([1, 2], {"a": [1]}, x_label="x", y_label="y")


def test_device_label_names_the_threads():
    assert f"{torch.get_num_threads()} thread" in viz.device_label("cpu")


def test_use_theme_outside_a_notebook_sets_the_style(monkeypatch):
    import matplotlib

    with matplotlib.rc_context():
        viz.use_theme()
        assert matplotlib.rcParams["text.color"] == theme.GREY


NOTEBOOK = """
import io
from kdtree_nb import viz
viz.use_theme()
def draw():
    return viz.plot_lines([1, 2], {"a": [1, 2]}, x_label="x", y_label="y")
"""


LAST_LINES = ("draw()", "draw();", "fig = draw()", "fig, ax = viz.figure(); ax.plot([1])")


def test_a_notebook_shows_a_figure_once_and_as_svg():
    cells = [nbformat.v4.new_code_cell(source) for source in (NOTEBOOK, *LAST_LINES)]
    notebook = NotebookClient(nbformat.v4.new_notebook(cells=cells), timeout=60).execute()
    for cell in notebook.cells[1:]:
        kinds = [kind for output in cell.outputs for kind in output.get("data", {}) if kind.startswith("image/")]
        assert kinds == ["image/svg+xml"], cell.source


@pytest.mark.parametrize(
    ("capability", "expected"), [(None, "cpu"), ((8, 9), "cpu"), ((9, 0), "cuda"), ((12, 0), "cuda")]
)
def test_device_is_a_gpu_that_the_kernels_know(monkeypatch, capability, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert viz.device() == expected
