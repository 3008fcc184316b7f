"""nbmake with the book's conftest and hooks: native output is kept, mutations run, a failing cell fails."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.book import mutation, nbcheck, prepare
from tests.book.folders import BOOK, read

EXACT = "assert reference.argmax(np.array([[0.0, 2.0, 1.0]])).tolist() == [1]"
BLIND = "assert len(reference.argmax(np.array([[0.0, 2.0, 1.0]]))) == 1"


def code(identity: str, source: str, kinds: list[str]) -> dict:
    metadata = {"tags": ["greedy-exact"], "exactness": kinds} if kinds else {}
    return {"cell_type": "code", "id": identity, "metadata": metadata, "source": source}


def run(folder: Path, cells: list[dict]) -> subprocess.CompletedProcess:
    """Execute a notebook of these cells as `make notebooks` does."""
    folder.mkdir()
    path = folder / "n.ipynb"
    notebook = {"cells": cells, "nbformat": 4, "nbformat_minor": 5}
    path.write_bytes(nbcheck.canonical_bytes(json.dumps(notebook).encode()))
    prepare.add_hooks(path, folder / "reports")
    shutil.copy(BOOK / "conftest.py", folder)
    command = [sys.executable, "-m", "pytest", "--nbmake", "--overwrite", "-p", "no:cacheprovider", "-c", os.devnull]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    return subprocess.run([*command, str(folder)], capture_output=True, text=True, timeout=120, env=environment)


@pytest.fixture(scope="module")
def executed(tmp_path_factory) -> Path:
    """Folder of a notebook that ran through."""
    setup = "import os\nimport numpy as np\nfrom kdtree_nb import reference\nos.write(1, b'native text\\n');"
    cells = [
        code("setup", setup, []),
        code("exact", EXACT, ["reference:argmax"]),
        code("blind", BLIND, ["reference:argmax"]),
    ]
    folder = tmp_path_factory.mktemp("nbmake") / "book"
    done = run(folder, cells)
    assert done.returncode == 0, done.stdout
    return folder


def test_native_output_reaches_the_notebook(executed: Path):
    outputs = read(executed / "n.ipynb")["cells"][0]["outputs"]
    assert "native text" in json.dumps(outputs)


def test_mutations_ran_inside_the_notebook(executed: Path):
    assert mutation.faults(read(executed / "reports" / "n" / "exact.json")) == []
    assert mutation.faults(read(executed / "reports" / "n" / "blind.json"))


def test_a_failing_cell_fails(tmp_path):
    done = run(tmp_path / "book", [code("wrong", "assert 1 == 2", [])])
    assert done.returncode == 1
    assert "1 failed" in done.stdout
