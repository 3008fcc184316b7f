"""The executed copies: everything ran, the tagged assertions and pictures are there, figures are described."""

from __future__ import annotations

import pytest

from tests.book import rules
from tests.book.folders import CHAPTERS, executed

MAX_TOTAL_S = 8 * 60


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_chapter_ran_and_keeps_the_rules(chapter: str):
    assert rules.executed_problems(executed(chapter)) == []


def test_all_chapters_together_stay_within_their_time():
    seconds = {c: sum(map(rules.cell_seconds, rules.code_cells(executed(c)))) for c in CHAPTERS}
    assert 0 < sum(seconds.values()) <= MAX_TOTAL_S, seconds


def test_figure_names_are_unique_in_the_book():
    cells = [cell for c in CHAPTERS for cell in rules.code_cells(executed(c))]
    names = [c["metadata"]["mystnb"]["figure"]["name"] for c in cells if "mystnb" in c["metadata"]]
    assert sorted(names) == sorted(set(names))
