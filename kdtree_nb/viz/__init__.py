"""Pictures, timing and exercises for the chapters. Figures are transparent and read in light and dark mode."""

from kdtree_nb.native.devices import device_label
from kdtree_nb.viz import exercise, gpu, k26
from kdtree_nb.viz.acceptance import draw_acceptance
from kdtree_nb.viz.budget import best_budget, plot_by_budget, plot_choice, plot_coverage
from kdtree_nb.viz.mask import draw_mask
from kdtree_nb.viz.recorded import Sweep, by_budget, coverage_by_rows, plot_breakdown, sweep
from kdtree_nb.viz.records import Record, Result, load_record, load_records
from kdtree_nb.viz.source import show_source
from kdtree_nb.viz.speedup import plot_speedup
from kdtree_nb.viz.text import draw_text
from kdtree_nb.viz.theme import (
    BLUE,
    CYCLE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    device,
    figure,
    plot_lines,
    use_theme,
)
from kdtree_nb.viz.timing import compare, measure, speedup
from kdtree_nb.viz.training import load_training, plot_depths, plot_expert_load, plot_training
from kdtree_nb.viz.tree import draw_tree, readable

__all__ = [
    "BLUE",
    "CYCLE",
    "GREEN",
    "GREY",
    "ORANGE",
    "PURPLE",
    "RED",
    "Record",
    "Result",
    "Sweep",
    "best_budget",
    "by_budget",
    "compare",
    "coverage_by_rows",
    "device",
    "device_label",
    "draw_acceptance",
    "draw_mask",
    "draw_text",
    "draw_tree",
    "exercise",
    "figure",
    "gpu",
    "k26",
    "load_record",
    "load_records",
    "load_training",
    "measure",
    "plot_breakdown",
    "plot_by_budget",
    "plot_choice",
    "plot_coverage",
    "plot_depths",
    "plot_expert_load",
    "plot_lines",
    "plot_speedup",
    "plot_training",
    "readable",
    "show_source",
    "speedup",
    "sweep",
    "use_theme",
]
