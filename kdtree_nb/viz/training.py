"""Loss curves of training runs, read from their records."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from kdtree_nb.viz.theme import BLUE, CYCLE, GREY, ORANGE, figure


def load_training(folder: str | Path) -> dict[str, Any]:
    """The record `training.json` of a folder that a training run wrote. ValueError when it has no curves."""
    path = Path(folder) / "training.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(record, dict) or not record.get("train_curve"):
        raise ValueError(f"load_training: {path}: expected a record with a train_curve, got none; train it again")
    return record


def smooth(values: Sequence[float], width: int) -> list[float]:
    """Running means over the last `width` values, fewer at the beginning."""
    windows = (values[max(0, end - width) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]


def plot_training(runs: Mapping[str, Mapping[str, Any]], width: int = 5, log_x: bool = False) -> Figure:
    """Loss in bits per byte over steps, one colour a run: what it was trained on (line), held-out code (dots).

    runs: label -> record of `load_training`. width: points of the running mean of the line. Losses in bits per byte
    compare models with different tokenizers.
    """
    if not runs:
        raise ValueError("plot_training: expected at least one run, got none")
    fig, ax = figure()
    for colour, (label, record) in zip(_colours(len(runs)), runs.items(), strict=True):
        train, heldout = record["train_curve"], record["heldout_curve"]
        bits = smooth([point["nats_per_token"] / math.log(2) / bytes_per_token(record) for point in train], width)
        ax.plot([point["step"] for point in train], bits, color=colour, label=f"{label}: training text")
        ax.plot(
            [point["step"] for point in heldout], [point["bits_per_byte"] for point in heldout],
            color=colour, linestyle=":", marker="o", markersize=4, label=f"{label}: held-out code",
        )  # fmt: skip
    ax.set(xlabel="step", ylabel="bits per byte")
    if log_x:
        ax.set_xscale("log")
    ax.legend()
    return fig


def plot_expert_load(record: Mapping[str, Any]) -> Figure:
    """The busiest and the idlest expert over steps, relative to an even load: what the routers' biases achieve."""
    curve = record["heldout_curve"]
    fig, ax = figure()
    steps = [point["step"] for point in curve]
    for colour, field, label in ((BLUE, "max_load", "busiest expert"), (ORANGE, "min_load", "idlest expert")):
        ax.plot(steps, [point[field] for point in curve], color=colour, marker="o", markersize=4, label=label)
    ax.axhline(1.0, color=GREY, linestyle="--", linewidth=1)
    ax.set(xlabel="step", ylabel="load / even load", ylim=(0, None))
    ax.legend()
    return fig


def plot_depths(record: Mapping[str, Any], depths: Sequence[int] = (1, 2, 4, 8, 15)) -> Figure:
    """Cross-entropy of a drafter's guesses over steps, a line for each depth that its blocks have."""
    curve = record["train_curve"]
    deepest = max(len(point["by_depth"]) for point in curve)
    fig, ax = figure()
    for index, depth in enumerate(d for d in depths if d <= deepest):
        points = [(p["step"], p["by_depth"][depth - 1]) for p in curve if p["by_depth"][depth - 1] is not None]
        ax.plot(*zip(*points, strict=True), color=CYCLE[index % len(CYCLE)], label=f"depth {depth}")
    ax.set(xlabel="step", ylabel="nats per token", ylim=(0, None))
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return fig


def bytes_per_token(record: Mapping[str, Any]) -> float:
    """Bytes of training text behind a token, on average."""
    train = record["corpus"]["streams"]["train"]
    return train["num_bytes"] / train["num_tokens"]


def _colours(count: int) -> list[str]:
    return [CYCLE[index % len(CYCLE)] for index in range(count)]
