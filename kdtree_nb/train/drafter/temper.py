"""A drafter's logits over a temperature: which one, and the checkpoint folder that has it in its weights.

The drafter gives marginals, depth by depth, and a node of a tree is given their product. Along a path acceptances go
together, so the product expects less than is accepted, however right the marginals are. One temperature mends the sum.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import save

from kdtree_nb.drafters import DFlash
from kdtree_nb.errors import CheckpointError
from kdtree_nb.kdtr import write_atomically
from kdtree_nb.train.drafter.record import FILES, write_record
from kdtree_nb.train.nano.export import RECORD, file_hash, folder_fingerprint

ENTRY = "temper"
"""In the record of a tempered drafter."""

NORM = "norm.weight"
"""What the logits are proportional to: the weight of the last norm, behind which comes only the target's head."""

RANGE = (0.8, 1.25)
"""Temperatures that are tried: a drafter that needs others has more wrong with it than this can mend."""

TOLERANCE = 5e-4
MAX_TRIALS = 7


def tempered(drafter: DFlash, temperature: float) -> DFlash:
    """The drafter with logits over `temperature`, but for the rounding of NORM to its dtype."""
    norm = drafter.weights[NORM]
    scaled = (norm.double() / temperature).to(norm.dtype)
    return DFlash(drafter.config, {**drafter.weights, NORM: scaled}, drafter.block_size, drafter.depth)


def find_temperature(excess: Callable[[float], float]) -> float:
    """The temperature of RANGE at which `excess`, which falls with it, is nearest to 0: a secant kept in a bracket.

    Ends within TOLERANCE, or with the best of MAX_TRIALS, since `excess` may jump over 0: trees differ from one
    temperature to the next. Raises ValueError where its sign is the same all over RANGE, or it is NaN.
    """
    low, high = (math.log(bound) for bound in RANGE)
    tried: dict[float, float] = {}
    at, slope = 0.0, -1.0
    while len(tried) < MAX_TRIALS and low < high:
        tried[at] = value = excess(math.exp(at))
        if not math.isfinite(value):
            raise ValueError(f"temper: temperature {math.exp(at):.4f}: expected a finite excess, got {value}")
        if abs(value) <= TOLERANCE:
            break
        low, high = (at, high) if value > 0 else (low, at)
        known = sorted(tried, key=lambda one: abs(tried[one]))[:2]
        if len(known) == 2:
            slope = (tried[known[1]] - tried[known[0]]) / (known[1] - known[0])
        guess = at - value / slope if slope < 0 else (low + high) / 2
        at = min(max(guess, low), high)
        at = (low + high) / 2 if at in tried else at
    best = min(tried, key=lambda one: abs(tried[one]))
    if low >= high:
        raise ValueError(
            f"temper: expected a temperature of {RANGE[0]} … {RANGE[1]} at which expected and accepted tokens agree, "
            f"got {tried[best]:+.1%} at {math.exp(best):.4f}; train the drafter longer, or temper on more --texts"
        )
    return math.exp(best)


def untempered_record(folder: Path, target: Path) -> dict[str, Any]:
    """The record of a drafter that may be tempered. Raises CheckpointError that says why another may not."""
    path = folder / RECORD
    if not path.is_file():
        raise CheckpointError(f"temper: expected a drafter that `train-nano drafter` wrote, found no {path}")
    record = json.loads(path.read_text(encoding="utf-8"))
    if ENTRY in record:
        raise CheckpointError(
            f"temper: {folder}: expected a drafter as it was trained, got one tempered with "
            f"{record[ENTRY]['temperature']:.4f}; to begin anew, put back the folder that `train-nano drafter` wrote, "
            "or train it again"
        )
    if record.get("target") != folder_fingerprint(target):
        raise CheckpointError(
            f"temper: {folder}: expected a drafter of the target {target}, got that of another; name its own target"
        )
    for name in FILES:
        if file_hash(folder / name) != record.get("files", {}).get(name, {}).get("sha256"):
            raise CheckpointError(
                f"temper: {folder / name}: expected the file of {RECORD}, got another; put back the folder that "
                "`train-nano drafter` wrote, or train it again"
            )
    return record


def write_tempered(folder: Path, drafter: DFlash, record: dict[str, Any], entry: dict[str, Any]) -> None:
    """Replace weights and record of `folder`. Stopped between the two, it is refused by `untempered_record`."""
    tensors = {name: value.detach().cpu().contiguous() for name, value in drafter.weights.items()}
    write_atomically(folder / FILES[1], [save(tensors, metadata={"format": "pt"})])
    write_record(folder, record | {ENTRY: entry})


def mean_excess(sums: list[dict[str, Any]]) -> float:
    """By how much more is expected than accepted: the mean over budgets of the relative difference.

    sums: {"budget", "expected", "accepted"} of each budget. Raises ValueError where nothing is accepted.
    """
    for entry in sums:
        if not entry["accepted"] > 0:
            raise ValueError(
                f"temper: budget {entry['budget']}: expected accepted tokens to agree with, got {entry['accepted']}; "
                "train the drafter longer"
            )
    return math.fsum(entry["expected"] / entry["accepted"] - 1 for entry in sums) / len(sums)
