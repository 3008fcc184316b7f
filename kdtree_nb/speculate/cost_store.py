"""Where cost models are kept: one JSON file per device, dtype and shape of model in a folder of the user."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from pathlib import Path

from kdtree_nb.drafters import AnyDrafter
from kdtree_nb.errors import CalibrationError
from kdtree_nb.kdtr import write_atomically
from kdtree_nb.model import Model
from kdtree_nb.native import load
from kdtree_nb.native.devices import device_label
from kdtree_nb.speculate.cost import CostKey, CostModel

DATA_VARIABLE = "KDTREE_DATA_DIR"


def data_dir() -> Path:
    """The user's data folder: $KDTREE_DATA_DIR, else $XDG_DATA_HOME/kdtree_nb, else ~/.local/share/kdtree_nb."""
    chosen = os.environ.get(DATA_VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share").absolute() / "kdtree_nb"


def cost_key(model: Model, kind: str) -> CostKey:
    """What times measured here and now hold for. kind: "host" or "device", who leads a step."""
    tensors = model.tensors()
    shapes = [(list(t.shape), str(t.dtype)) for t in tensors]
    shape = _digest(json.dumps([model.config.to_dict(), shapes], sort_keys=True).encode())
    sample = [model.norm.float().cpu(), model.embedding[:64].float().cpu()]
    weights = _digest(b"".join(t.numpy().tobytes() for t in sample))
    dtype = str(model.dtype).removeprefix("torch.")
    return CostKey(device_label(model.device), dtype, kind, shape, weights, load().namespace)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def drafter_key(drafter: AnyDrafter, is_chain: bool = False) -> str:
    """The name under which what a drafter takes is kept: its class and depth, and whether it is asked for chains."""
    return f"{type(drafter).__name__} of depth {drafter.depth}" + (", chain" if is_chain else "")


def cost_path(key: CostKey, folder: Path | None = None) -> Path:
    """The file of a cost model; `folder` by default calibration/ in the user's data folder."""
    device = "-".join(re.findall(r"[a-z0-9.]+", key.device.lower()))
    name = f"{device}-{key.dtype}-{key.kind}-{key.shape}.json"
    return (folder or data_dir() / "calibration") / name


def save_cost(cost: CostModel, folder: Path | None = None) -> Path:
    """Write a cost model atomically, and return its file. Drafters that were measured for the same key are kept."""
    path = cost_path(cost.key, folder)
    try:
        before = _read(path)
    except CalibrationError:
        before = None
    if before is not None and before.key == cost.key:
        known = {"overhead": {**before.overhead, **cost.overhead}, "typical": {**before.typical, **cost.typical}}
        cost = dataclasses.replace(cost, **known)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, [json.dumps(cost.to_dict(), indent=1).encode()])
    return path


def load_cost(model: Model, kind: str, folder: Path | None = None) -> CostModel:
    """The cost model of this device, model, dtype and build. Raises CalibrationError if it is absent or stale."""
    key = cost_key(model, kind)
    path = cost_path(key, folder)
    cost = _read(path)
    if cost is None:
        raise CalibrationError(
            f'budget="auto": expected a cost model of {key.device}, {key.dtype}, found none at {path}; '
            f"measure it once: {_command(model)}"
        )
    check_cost(cost, key, str(path), _command(model))
    return cost


def check_cost(cost: CostModel, key: CostKey, where: str, remedy: str) -> None:
    """Raises CalibrationError, naming what differs, unless `cost` was measured for `key`."""
    got, want = dataclasses.asdict(cost.key), dataclasses.asdict(key)
    differs = [f"{name} {want[name]!r}, got {got[name]!r}" for name in want if got[name] != want[name]]
    if differs:
        raise CalibrationError(
            f'budget="auto": {where} is stale: expected {"; ".join(differs)}. Measure again: {remedy}'
        )


def _command(model: Model) -> str:
    options = [] if model.device.type == "cpu" else [f"--device {model.device}"]
    options += [f"--dtype {str(model.dtype).removeprefix('torch.')}"] if str(model.dtype) != "torch.float32" else []
    return " ".join(["kdtree-nb calibrate --model MODEL", *options])


def _read(path: Path) -> CostModel | None:
    try:
        return CostModel.from_dict(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except CalibrationError as error:
        raise CalibrationError(f"{path}: {error}") from error
    except ValueError as error:
        raise CalibrationError(
            f"cost model: {path}: expected JSON, got {error}; run kdtree-nb calibrate again"
        ) from error
