"""Two texts side by side in a terminal, with marked pieces."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kdtree_nb.commands.common import printable

MARK, UNMARK = "\x1b[32m", "\x1b[0m"
TAB = "    "


class Piece(NamedTuple):
    """Some text, and whether it is to be marked."""

    text: str
    marked: bool = False


def side_by_side(
    left: Sequence[Piece], right: Sequence[Piece], titles: tuple[str, str], width: int, colour: bool
) -> Iterator[str]:
    """Lines of two titled columns that fill `width` characters. Marked pieces are green where `colour`."""
    column = (width - 3) // 2
    yield f"{_rule(titles[0], column)}─┬─{_rule(titles[1], column)}"
    left_lines, right_lines = ([*wrap(pieces, column)] for pieces in (left, right))
    for i in range(max(len(left_lines), len(right_lines))):
        cells = [lines[i] if i < len(lines) else [] for lines in (left_lines, right_lines)]
        yield " │ ".join(_paint(cell, column, colour) for cell in cells).rstrip()
    yield f"{'─' * column}─┴─{'─' * column}"


def wrap(pieces: Iterable[Piece], width: int) -> Iterator[list[Piece]]:
    """Lines of at most `width` cells, of one character per Piece; tabs become blanks, control characters pictures."""
    line: list[Piece] = []
    used = 0
    for char, marked in ((c, p.marked) for p in pieces for c in printable(p.text).replace("\t", TAB)):
        cells = _cells(char)
        if char == "\n" or used + cells > width:
            yield line
            line, used = [], 0
        if char != "\n":
            line.append(Piece(char, marked))
            used += cells
    yield line


def _cells(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def _paint(line: Sequence[Piece], width: int, colour: bool) -> str:
    parts, marked = [], False
    for piece in line:
        if colour and piece.marked != marked:
            parts.append(MARK if piece.marked else UNMARK)
            marked = piece.marked
        parts.append(piece.text)
    if marked:
        parts.append(UNMARK)
    return "".join(parts) + " " * (width - sum(_cells(piece.text) for piece in line))


def _rule(title: str, width: int) -> str:
    return f"── {title} ".ljust(width, "─")[:width]
