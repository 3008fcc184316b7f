"""The committed chapters keep the rules of README.md."""

from __future__ import annotations

import pytest
import yaml

from tests.book import nbcheck, rules
from tests.book.folders import BOOK, CHAPTERS, read


def test_contents_list_every_chapter_in_order():
    contents = yaml.safe_load((BOOK / "_toc.yml").read_text(encoding="utf-8"))
    files = [chapter["file"] for part in contents["parts"] for chapter in part["chapters"]]
    assert [f for f in files if f[:2].isdigit()] == CHAPTERS
    assert not [f for f in files if not f[:2].isdigit() and not (BOOK / f"{f}.md").is_file()]


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_chapter_is_canonical(chapter: str):
    assert nbcheck.problems((BOOK / f"{chapter}.ipynb").read_bytes()) == []


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_chapter_keeps_the_rules(chapter: str):
    assert rules.source_problems(read(BOOK / f"{chapter}.ipynb")) == []


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_title_carries_the_chapter_number(chapter: str):
    first = rules.source_text(read(BOOK / f"{chapter}.ipynb")["cells"][0]).split("\n")[0]
    assert first.startswith(f"# {chapter[:2]} · ")
