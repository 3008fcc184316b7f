"""Columns: wrapping, tabs, wide and control characters, marks."""

from __future__ import annotations

from kdtree_nb.commands.columns import MARK, UNMARK, Piece, side_by_side, wrap


def texts(text: str, width: int) -> list[str]:
    return ["".join(piece.text for piece in line) for line in wrap([Piece(text)], width)]


def test_wrapping():
    assert texts("abcde\nf\n", 3) == ["abc", "de", "f", ""]
    assert texts("\ta", 6) == ["    a"]
    assert texts("漢字a", 3) == ["漢", "字a"]
    assert texts("a\x1b[2J\x00", 20) == ["a\N{SYMBOL FOR ESCAPE}[2J\N{SYMBOL FOR NULL}"]
    assert texts("e\N{COMBINING ACUTE ACCENT}fg", 2) == ["e\N{COMBINING ACUTE ACCENT}f", "g"]


def test_side_by_side():
    lines = list(side_by_side([Piece("one\ntwo")], [Piece("1", True), Piece("2")], ("L", "R"), 23, colour=True))
    assert lines[1:-1] == [f"one        │ {MARK}1{UNMARK}2", "two        │"]
    assert "── L ─" in lines[0] and "── R ─" in lines[0]
    plain = list(side_by_side([Piece("a", True)], [Piece("b", True)], ("L", "R"), 23, colour=False))
    assert plain[1] == "a          │ b"
    assert {len(line) for line in (lines[0], lines[-1])} == {23}
