"""Make the copies of the book that are executed and rendered.

python -m tests.book.prepare DESTINATION [--chapter NAME ...]

Copies book/ to DESTINATION, lets each `greedy-exact` cell run its mutations after it has run, and links kernels/,
kdtree_nb/ and data/ beside DESTINATION, so that relative paths mean the same as in book/. With --chapter, only these
notebooks are copied and the table of contents is cut down to them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
REPORTS = "mutations"
"""Folder beside the copies' folder that holds one JSON report per greedy-exact cell: <notebook>/<cell id>.json."""

_HOOK = """\
import sys as _sys
_sys.path.insert(0, {root!r})
from tests.book.mutation import exercise_cell as _exercise_cell
_sys.path.remove({root!r})
_exercise_cell(globals(), {notebook!r}, {cell!r}, {report!r})
del _sys, _exercise_cell
"""


def add_hooks(path: Path, reports: Path) -> None:
    """Make nbmake run the mutations of each greedy-exact cell of the notebook `path` right after the cell."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if "greedy-exact" in cell["metadata"].get("tags", []):
            report = reports / path.stem / f"{cell['id']}.json"
            code = _HOOK.format(root=str(ROOT), notebook=str(path), cell=cell["id"], report=str(report))
            cell["metadata"]["nbmake"] = {"post_cell_execute": code.splitlines()}
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def cut_contents(contents: dict[str, Any], keep: set[str]) -> dict[str, Any]:
    """A table of contents without the numbered chapters that are not in `keep`; parts left empty disappear."""
    parts = []
    for part in contents["parts"]:
        chapters = [c for c in part["chapters"] if not c["file"][:2].isdigit() or c["file"] in keep]
        parts += [part | {"chapters": chapters}] if chapters else []
    return contents | {"parts": parts}


def prepare(destination: Path, chapters: list[str] | None = None) -> None:
    """Make the copies; see the module's text. Raises ValueError for a chapter that does not exist."""
    source = ROOT / "book"
    existing = {path.stem for path in source.glob("*.ipynb")}
    missing = set(chapters or ()) - existing
    if missing:
        raise ValueError(f"prepare: expected chapters among {sorted(existing)}, got {sorted(missing)}")
    shutil.rmtree(destination, ignore_errors=True)
    shutil.rmtree(destination.parent / REPORTS, ignore_errors=True)
    ignored = shutil.ignore_patterns("_build", ".ipynb_checkpoints", "__pycache__", ".pytest_cache")
    shutil.copytree(source, destination, ignore=ignored)
    for name in ("kernels", "kdtree_nb", "data"):
        link = destination.parent / name
        if not link.is_symlink():
            link.symlink_to(ROOT / name)
    for path in destination.glob("*.ipynb"):
        if chapters and path.stem not in chapters:
            path.unlink()
        else:
            add_hooks(path, (destination.parent / REPORTS).resolve())
    if chapters:
        toc = destination / "_toc.yml"
        contents = cut_contents(yaml.safe_load(toc.read_text(encoding="utf-8")), set(chapters))
        toc.write_text(yaml.safe_dump(contents, sort_keys=False), encoding="utf-8")


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("destination", type=Path)
    parser.add_argument("--chapter", action="append", help="only this notebook (may be repeated)")
    options = parser.parse_args()
    try:
        prepare(options.destination.resolve(), options.chapter)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
