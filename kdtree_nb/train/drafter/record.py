"""The record beside a drafter's weights, with size and SHA-256 of its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kdtree_nb.kdtr import write_atomically
from kdtree_nb.train.nano.export import RECORD, file_hash

FILES = ("config.json", "model.safetensors")


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Write training.json: the record, with the files as they are in `folder` now."""
    files = {name: {"bytes": (folder / name).stat().st_size, "sha256": file_hash(folder / name)} for name in FILES}
    write_atomically(folder / RECORD, [json.dumps(record | {"files": files}, indent=1).encode() + b"\n"])
