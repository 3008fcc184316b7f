"""The picture of the README and of the book's cover: text that the engine wrote, and recorded speedups.

python -m kdtree_nb.viz.result book/_static/result.svg
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kdtree_nb.drafters import NGram
from kdtree_nb.model import load_model
from kdtree_nb.speculate import Engine
from kdtree_nb.viz.records import Record, load_records
from kdtree_nb.viz.speedup import ratio_bar
from kdtree_nb.viz.text import draw_text, text_height
from kdtree_nb.viz.theme import GREY, ORANGE, use_theme

PROMPTS = Path(__file__).resolve().parents[2] / "data" / "prompts.json"
PROMPT, NUM_TOKENS, BUDGET = "read_config", 192, 16
HEADLINES = (
    ("ngram_ddtree", "AR", "DDTree", "draft trees / AR decoding"),
    ("ar_step", "numpy", "native", "AR step: native / numpy"),
    ("ar_step", "eager torch", "native", "AR step: native / eager torch"),
    ("tree_build", "heapq", "native", "tree_build: native / heapq"),
)
"""Recorded comparisons on the picture: group, baseline, contender, label. Those that no record holds are left out."""


def headline_bars(records: Sequence[Record]) -> list[tuple[str, float]]:
    """(label, ratio of medians) of every headline in every record that holds it."""
    bars = []
    for group, baseline, contender, label in HEADLINES:
        for record in records:
            pairs = record.pairs(f"{group}/{baseline}", f"{group}/{contender}")
            bars += [(f"{label}\n{record.device}", ratio_bar(slow.samples, fast.samples).ratio) for slow, fast in pairs]
    return bars


def draw_result(records: Sequence[Record]) -> Figure:
    """Generate with AR and DDTree, check that they agree, and draw the text above the recorded speedups."""
    model = load_model("tiny")
    prompts = {p["name"]: p["text"] for p in json.loads(PROMPTS.read_text(encoding="utf-8"))["prompts"]}
    prompt = prompts[PROMPT]
    engine = Engine(model, drafter=NGram(), budget=BUDGET)
    ddtree = engine.generate_ddtree(model.tokenizer.encode(prompt), NUM_TOKENS)
    if ddtree.tokens != engine.generate_ar(model.tokenizer.encode(prompt), NUM_TOKENS).tokens:
        raise AssertionError("draw_result: DDTree and AR tokens differ; there is no result to show")
    bars = headline_bars(records)
    num_lines = (prompt + model.tokenizer.decode(ddtree.tokens)).count("\n") + 1
    heights = [text_height(num_lines) + 0.5, 0.3 * len(bars) + 0.6][: 2 if bars else 1]
    fig = plt.figure(figsize=(8, sum(heights)))
    parts = fig.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    ax = parts[0].subplots()
    draw_text(prompt, ddtree.tokens, ddtree.stats.accepted_per_step, model.tokenizer.decode, ax=ax)
    forwards, count = ddtree.stats.num_target_forwards, len(ddtree.tokens)
    title = f"{count} tokens in {forwards} target forwards: accepted guesses (blue), the target's own (orange)"
    ax.set_title(f"{title}.\nThe same text as with {count} forwards, one token at a time.")
    if bars:
        _draw_bars(parts[1].subplots(), bars)
    return fig


def _draw_bars(ax: Axes, bars: list[tuple[str, float]]) -> None:
    for row, (_, ratio) in enumerate(bars):
        ax.barh(row, ratio, height=0.6, color="none", edgecolor=ORANGE, hatch="////")
        ax.annotate(f"{ratio:.2f}×", (ratio, row), (6, 0), textcoords="offset points", va="center")
    ax.axvline(1.0, color=GREY, linestyle="--", linewidth=1)
    ax.set_yticks(range(len(bars)), [label for label, _ in bars], fontsize=8)
    ax.set(xlabel="times faster (recorded medians)", xlim=(0, 1.15 * max(ratio for _, ratio in bars)))
    ax.invert_yaxis()
    ax.grid(False, axis="y")


def main() -> None:
    """Write the picture to the path given on the command line."""
    use_theme()
    draw_result(load_records()).savefig(sys.argv[1], metadata={"Date": None})


if __name__ == "__main__":
    main()
