"""Text drawings: a box per generated character, coloured by its source; steps must add up."""

from __future__ import annotations

import pytest
from matplotlib.colors import to_hex

from kdtree_nb import viz
from kdtree_nb.viz.text import token_sources


def decode(ids: list[int]) -> str:
    return bytes(ids).decode()


def test_each_token_has_the_colour_of_its_source():
    fig = viz.draw_text("ab\n", list(b"xyz\nw"), [2, 0, 1], decode)
    boxes = [(round(p.get_x()), to_hex(p.get_facecolor())) for p in fig.axes[0].patches]
    assert boxes == [(0, viz.BLUE), (1, viz.BLUE), (2, viz.ORANGE), (3, viz.ORANGE), (0, viz.BLUE)]
    assert [t.get_text() for t in fig.axes[0].texts] == ["a", "b", "x", "y", "z", "⏎", "w"]


def test_long_lines_are_broken():
    fig = viz.draw_text("", list(b"abcdef"), [5], decode, width=4)
    assert [round(p.get_x()) for p in fig.axes[0].patches] == [0, 1, 2, 3, 0, 1]


def test_sources():
    assert token_sources([2, 0], 4) == ["guess", "guess", "target", "target"]
    assert token_sources([2, 1], 4) == ["guess", "guess", "target", "guess"]
    for count in (2, 5):
        with pytest.raises(ValueError, match=f"expected steps of {count} tokens"):
            token_sources([2, 0] if count == 5 else [2, 1], count)
