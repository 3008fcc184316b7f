"""Every greedy-exact cell of every chapter noticed every fault that was planted under it when its copy was executed."""

from __future__ import annotations

import pytest

from tests.book import mutation, rules
from tests.book.folders import BUILD, CHAPTERS, executed, read


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_every_mutation_was_noticed(chapter: str):
    exact = [cell for cell in rules.code_cells(executed(chapter)) if "greedy-exact" in rules.tags(cell)]
    assert exact, "no cell is tagged greedy-exact"
    faults = []
    for cell in exact:
        path = BUILD / "mutations" / chapter / f"{cell['id']}.json"
        report = read(path) if path.is_file() else {}
        assert not report or set(report) == set(cell["metadata"]["exactness"])
        faults += [f"cell {cell['id']}: {fault}" for fault in mutation.faults(report)]
    assert faults == []
