"""Where the book's sources and its executed copies are."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BOOK = ROOT / "book"
BUILD = Path(os.environ.get("KDTREE_NB_BUILD", ROOT / "build"))
"""Folder with book/ (executed copies), mutations/ (reports) and html/; environment variable KDTREE_NB_BUILD."""

REQUIRED = os.environ.get("KDTREE_NB_REQUIRE_BUILD") == "1"
"""Set by `make test`: a missing or stale build is a failure. Otherwise its tests are skipped, with this reason."""

CHAPTERS = sorted(path.stem for path in BOOK.glob("*.ipynb"))


def read(path: Path) -> dict[str, Any]:
    """A notebook or report as JSON."""
    return json.loads(path.read_text(encoding="utf-8"))


def sources(notebook: dict[str, Any]) -> list[tuple[str, str]]:
    """(id, source) of every cell."""
    return [(cell["id"], "".join(cell["source"])) for cell in notebook["cells"]]


def executed(chapter: str) -> dict[str, Any]:
    """The executed copy of a chapter; skips, or fails when REQUIRED, if it is missing or of an older source."""
    path = BUILD / "book" / f"{chapter}.ipynb"
    if path.is_file() and sources(read(path)) == sources(read(BOOK / f"{chapter}.ipynb")):
        return read(path)
    unavailable(f"{path} is missing or older than book/{chapter}.ipynb: run `make notebooks`")


def unavailable(reason: str) -> None:
    """Fail when a build is required, else skip."""
    if REQUIRED:
        pytest.fail(reason)
    pytest.skip(reason)
