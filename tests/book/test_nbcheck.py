"""The canonical form: everything that is not canonical is noticed and fixed, and fixing is idempotent."""

from __future__ import annotations

import copy
import json

import nbformat
import pytest

from tests.book import nbcheck

GOOD = json.loads(
    nbcheck.canonical_bytes(
        json.dumps(
            {
                "cells": [
                    {"cell_type": "markdown", "id": "a1", "metadata": {}, "source": "# T · é\n\ntext  \nmore"},
                    {
                        "cell_type": "code",
                        "id": "b2",
                        "metadata": {"tags": ["speedup"]},
                        "source": ["x = 1\n", "x"],
                        "outputs": [],
                        "execution_count": None,
                    },
                ],
                "metadata": {},
                "nbformat": 4,
                "nbformat_minor": 5,
            }
        ).encode()
    )
)


def encode(notebook: dict) -> bytes:
    return (json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def spoil(change) -> bytes:
    notebook = copy.deepcopy(GOOD)
    change(notebook)
    return encode(notebook)


def test_canonical_bytes_are_those_of_nbformat(tmp_path):
    path = tmp_path / "n.ipynb"
    path.write_bytes(encode(GOOD))
    assert nbcheck.problems(path.read_bytes()) == []
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    nbformat.write(notebook, path)
    assert path.read_bytes() == encode(GOOD)


BROKEN = {
    "output": lambda n: n["cells"][1].update(outputs=[{"output_type": "stream", "name": "stdout", "text": ["1"]}]),
    "count": lambda n: n["cells"][1].update(execution_count=3),
    "no id": lambda n: n["cells"][0].pop("id"),
    "repeated id": lambda n: n["cells"][1].update(id="a1"),
    "bad id": lambda n: n["cells"][1].update(id="ü"),
    "cell metadata": lambda n: n["cells"][1]["metadata"].update(collapsed=True),
    "times": lambda n: n["cells"][1]["metadata"].update(execution={"iopub.status.busy": "2026"}),
    "notebook metadata": lambda n: n["metadata"]["language_info"].update(version="3.11.7"),
    "trailing blanks": lambda n: n["cells"][1].update(source=["x = 1  \n", "x\n"]),
    "attachments": lambda n: n["cells"][0].update(attachments={}),
    "minor version": lambda n: n.update(nbformat_minor=4),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_deviation_is_noticed_and_fixed(name: str, tmp_path, capsys):
    raw = spoil(BROKEN[name])
    assert nbcheck.problems(raw)
    path = tmp_path / "n.ipynb"
    path.write_bytes(raw)
    assert nbcheck.main([str(path)]) == 1
    assert path.read_bytes() == raw
    assert nbcheck.main(["--fix", str(path)]) == 0
    assert nbcheck.problems(path.read_bytes()) == []
    assert nbcheck.main([str(path)]) == 0
    assert "fixed" in capsys.readouterr().out


def test_layout_of_the_bytes_matters():
    assert nbcheck.problems(json.dumps(GOOD).encode()) == ["bytes differ from nbformat's own output"]
    assert nbcheck.problems(encode(GOOD).replace(b"\n", b"\r\n"))


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"nbformat": 3}', b"\xff", b'{"nbformat": 4, "cells": 1}'])
def test_what_is_no_notebook_is_said_so(raw: bytes):
    assert len(nbcheck.problems(raw)) == 1


def test_markdown_line_breaks_survive():
    assert GOOD["cells"][0]["source"][2] == "text  \n"
