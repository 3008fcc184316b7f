"""The rendered book: figures are described, no output holds a traceback or a NaN, inner links lead somewhere."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from bs4 import BeautifulSoup

from tests.book.folders import BUILD, CHAPTERS, unavailable

HTML = BUILD / "html"
NOT_OURS = {"genindex.html", "search.html"}


@cache
def page(path: Path) -> BeautifulSoup:
    return BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")


def pages() -> list[Path]:
    """The rendered pages; skips or fails when there are none."""
    found = [p for p in sorted(HTML.rglob("*.html")) if p.name not in NOT_OURS and "_static" not in p.parts]
    if not found:
        unavailable(f"{HTML} holds no pages: run `make book`")
    return found


def article(path: Path) -> BeautifulSoup:
    """A page's own content, without navigation."""
    return page(path).find("article") or page(path)


def test_every_chapter_and_the_index_are_there():
    names = {path.stem for path in pages()}
    assert set(CHAPTERS) | {"index", "notation", "kdtr_format", "api", "reproduce", "bibliography"} <= names


def test_every_image_has_a_description():
    bad = []
    for path in pages():
        for image in article(path).find_all("img"):
            alt = (image.get("alt") or "").strip()
            if len(alt.split()) < 4 or re.search(r"\.(png|svg)$|[0-9a-f]{16}", alt):
                bad.append(f"{path.name}: {image.get('src')}: {alt!r}")
    assert bad == []


def test_every_code_figure_has_a_caption():
    bad = []
    for path in pages():
        for image in article(path).select("div.cell_output img"):
            figure = image.find_parent("figure")
            if figure is None or not figure.find("figcaption"):
                bad.append(f"{path.name}: {image.get('src')}")
    assert bad == []


def test_no_output_holds_a_traceback_or_a_nan():
    bad = []
    for path in pages():
        for output in article(path).select("div.cell_output"):
            text = output.get_text()
            if re.search(r"Traceback \(most recent call last\)|\bnan\b", text):
                bad.append(f"{path.name}: {text[:80]!r}")
    assert bad == []


def test_inner_links_lead_somewhere():
    known = {path.resolve(): {e["id"] for e in page(path).find_all(id=True)} for path in pages()}
    bad = []
    for path in pages():
        for link in article(path).find_all("a", href=True):
            target = urlsplit(link["href"])
            if target.scheme or target.netloc:
                continue
            file = (path.parent / unquote(target.path)).resolve() if target.path else path.resolve()
            if not file.exists() or (file in known and target.fragment and unquote(target.fragment) not in known[file]):
                bad.append(f"{path.name}: {link['href']}")
    assert bad == []


def test_no_role_or_directive_was_left_unrendered():
    bad = [p.name for p in pages() for t in [article(p)] if re.search(r"\{(ref|doc|term|cite|glue)[:}]", _prose(t))]
    assert bad == []


def _prose(content: BeautifulSoup) -> str:
    return " ".join(p.get_text() for p in content.find_all(["p", "li", "td"]) if not p.find("code"))


@pytest.mark.parametrize("asset", ["_static/book.css", "_static/logo.svg"])
def test_assets_are_there(asset: str):
    pages()
    assert (HTML / asset).is_file()
