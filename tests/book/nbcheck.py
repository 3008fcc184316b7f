"""Canonical form of a committed notebook: no outputs, cell ids, known metadata only, byte-for-byte nbformat output.

python tests/book/nbcheck.py [--fix] [notebook ...]    (default: book/*.ipynb); exit status 1 if one is not canonical
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import uuid
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 300
"""For one cell: long enough for a first compilation of the kernels. Chapters are held to less by test_executed.py."""
METADATA = {
    "execution": {"timeout": TIMEOUT_S},
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
CELL_KEYS = ("exactness", "mystnb", "tags")
_CELL_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def canonical(notebook: dict[str, Any]) -> dict[str, Any]:
    """The canonical form of a notebook (nbformat 4 JSON); good cell ids are kept, missing or repeated ones replaced."""
    seen: set[str] = set()
    cells = [_cell(cell, seen) for cell in notebook["cells"]]
    return {"cells": cells, "metadata": METADATA, "nbformat": 4, "nbformat_minor": 5}


def _cell(cell: dict[str, Any], seen: set[str]) -> dict[str, Any]:
    identity = cell.get("id", "")
    if not isinstance(identity, str) or not _CELL_ID.fullmatch(identity) or identity in seen:
        identity = uuid.uuid4().hex[:8]
    seen.add(identity)
    source = "".join(cell["source"]).rstrip()
    lines = "\n".join(line.rstrip() if cell["cell_type"] == "code" else line for line in source.split("\n"))
    metadata = {key: cell["metadata"][key] for key in CELL_KEYS if cell.get("metadata", {}).get(key)}
    fields = {"cell_type": cell["cell_type"], "id": identity, "metadata": metadata, "source": lines.splitlines(True)}
    if cell["cell_type"] == "code":
        fields |= {"execution_count": None, "outputs": []}
    return fields


def canonical_bytes(raw: bytes) -> bytes:
    """Bytes of the canonical form, as nbformat writes them. Raises ValueError when `raw` is no notebook of format 4."""
    try:
        notebook = json.loads(raw)
        if notebook["nbformat"] != 4:
            raise ValueError(f"expected nbformat 4, got {notebook['nbformat']!r}")
        text = json.dumps(canonical(notebook), indent=1, sort_keys=True, ensure_ascii=False)
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"expected a notebook in JSON, got {error!r}") from error
    return (text + "\n").encode()


def problems(raw: bytes) -> list[str]:
    """What is not canonical about a notebook's bytes, in words; empty when they are canonical."""
    try:
        wanted = canonical_bytes(raw)
    except ValueError as error:
        return [str(error)]
    if raw == wanted:
        return []
    found = []
    notebook = json.loads(raw)
    for number, (cell, good) in enumerate(zip(notebook["cells"], json.loads(wanted)["cells"], strict=True)):
        found += [f"cell {number}: {key}: not canonical" for key in good if cell.get(key) != good[key]]
        found += [f"cell {number}: {key}: unknown" for key in cell if key not in good]
    if notebook.get("metadata") != METADATA:
        found.append("metadata: not canonical")
    return found or ["bytes differ from nbformat's own output"]


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fix", action="store_true", help="rewrite what is not canonical")
    parser.add_argument("notebooks", nargs="*", type=Path, default=sorted((ROOT / "book").glob("*.ipynb")))
    options = parser.parse_args(arguments)
    status = 0
    for path in options.notebooks:
        raw = path.read_bytes()
        found = problems(raw)
        for problem in found:
            print(f"{path}: {problem}")
        if found and options.fix:
            path.write_bytes(canonical_bytes(raw))
            print(f"{path}: fixed")
        elif found:
            status = 1
    if status:
        print("make them canonical with: python tests/book/nbcheck.py --fix", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
