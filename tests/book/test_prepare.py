"""Copies for execution: sources unchanged, hooks only at greedy-exact cells, contents cut down when asked."""

from __future__ import annotations

import json

import pytest

from tests.book import prepare
from tests.book.folders import sources

CELLS = [
    {"cell_type": "markdown", "id": "a", "metadata": {}, "source": ["# T"]},
    {"cell_type": "code", "id": "b", "metadata": {"tags": ["greedy-exact"], "exactness": ["tokens"]}, "source": ["1"]},
    {"cell_type": "code", "id": "c", "metadata": {}, "source": ["2"]},
]
CONTENTS = {
    "format": "jb-book",
    "parts": [
        {"caption": "I", "chapters": [{"file": "00_a"}, {"file": "01_b"}]},
        {"caption": "II", "chapters": [{"file": "02_c"}]},
        {"caption": "A", "chapters": [{"file": "appendices/x"}]},
    ],
}


def test_hooks_are_added_to_exact_cells_only(tmp_path):
    path = tmp_path / "01_b.ipynb"
    path.write_text(json.dumps({"cells": CELLS}))
    prepare.add_hooks(path, tmp_path / "reports")
    notebook = json.loads(path.read_text())
    assert sources(notebook) == sources({"cells": CELLS})
    assert ["nbmake" in cell["metadata"] for cell in notebook["cells"]] == [False, True, False]
    hook = "\n".join(notebook["cells"][1]["metadata"]["nbmake"]["post_cell_execute"])
    assert str(tmp_path / "reports" / "01_b" / "b.json") in hook
    compile(hook, "hook", "exec")


def test_contents_are_cut_down():
    cut = prepare.cut_contents(CONTENTS, {"01_b"})
    assert cut["parts"] == [{"caption": "I", "chapters": [{"file": "01_b"}]}, CONTENTS["parts"][2]]


def test_an_unknown_chapter_is_refused(tmp_path):
    with pytest.raises(ValueError, match="99_none"):
        prepare.prepare(tmp_path / "book", ["99_none"])


def test_copies_see_the_same_neighbours(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "ROOT", tmp_path / "repo")
    book = tmp_path / "repo" / "book"
    (book / "_static").mkdir(parents=True)
    (book / "00_a.ipynb").write_text(json.dumps({"cells": CELLS}))
    (book / "_static" / "x.css").write_text("")
    prepare.prepare(tmp_path / "out" / "book")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["book", "data", "kdtree_nb", "kernels"]
    assert (tmp_path / "out" / "book" / "_static" / "x.css").is_file()
    assert (tmp_path / "out" / "kernels").readlink() == tmp_path / "repo" / "kernels"
