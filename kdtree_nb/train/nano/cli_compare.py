"""Step compare of `kdtree-nb train-nano`: do two runs of one seed have the same loss curve?"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from kdtree_nb.errors import CorpusError
from kdtree_nb.train.checkpoint import TABLE, latest_checkpoint
from kdtree_nb.train.nano.export import RECORD


def main(step: str, argv: list[str], prog: str) -> None:
    """Print the largest difference; raise ValueError when it is beyond the tolerance."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("runs", type=Path, nargs=2, metavar="RUN", help="folder of checkpoints, or of a trained target")
    parser.add_argument("--tolerance", type=float, default=0.0, help="nats per token (default: 0, equal to the bit)")
    args = parser.parse_args(argv)
    curves = [read_curve(folder) for folder in args.runs]
    num_points, largest, at = largest_difference(*curves)
    last = min(max(curve) for curve in curves)
    print(f"{num_points} points of both, up to step {last}: at most {largest:.6f} nats per token apart (step {at})")
    if not largest <= args.tolerance:
        raise ValueError(f"compare: expected differences of at most {args.tolerance} nats per token, got {largest}")


def read_curve(folder: Path) -> dict[int, float]:
    """Step -> mean loss in nats per token, of a trained target or of the latest checkpoint. Raises CorpusError where
    the folder holds neither."""
    place = latest_checkpoint(folder)
    if (folder / RECORD).is_file():
        curve = json.loads((folder / RECORD).read_text(encoding="utf-8"))["train_curve"]
    elif place is not None:
        curve = json.loads((place / TABLE).read_text(encoding="utf-8"))["state"]["train_curve"]
    else:
        raise CorpusError(f"compare: {folder}: expected {RECORD} or checkpoints of a training run, got neither")
    return {point["step"]: point["nats_per_token"] for point in curve}


def largest_difference(one: dict[int, float], other: dict[int, float]) -> tuple[int, float, int]:
    """(points that both have, largest difference of them, its step). ValueError when they share none."""
    shared = sorted(one.keys() & other.keys())
    if not shared:
        raise ValueError("compare: expected curves with steps in common, got none; train both longer")
    at = max(shared, key=lambda step: abs(one[step] - other[step]))
    return len(shared), abs(one[at] - other[at]), at
