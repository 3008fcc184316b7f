"""Trees: children lie below and under their parent, labels are readable, the accepted path stands out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtree_nb import viz
from kdtree_nb.viz.tree import _columns


def labels(fig) -> list[str]:
    return [text.get_text() for text in fig.axes[0].texts]


def test_labels_are_decoded_and_blanks_made_visible(tree):
    fig = viz.draw_tree(tree, decode=lambda ids: chr(ids[0]))
    assert labels(fig) == ["A", "B", "⏎", "D", "␣"]


def test_without_decode_labels_are_ids(tree):
    assert labels(viz.draw_tree(tree))[:2] == ["65", "66"]


def test_a_root_alone_can_be_drawn(tree):
    assert labels(viz.draw_tree(tree, stream=1)) == ["70"]


def test_accepted_path_is_heavier_than_the_rest(tree):
    fig = viz.draw_tree(tree, accepted=[1, 3, -1, -1])
    widths = [line.get_linewidth() for line in fig.axes[0].get_lines()]
    assert min(widths[0], widths[2]) > max(widths[1], widths[3])
    weights = [text.get_fontweight() for text in fig.axes[0].texts]
    assert weights == ["bold", "bold", "normal", "bold", "normal"]


def test_an_accepted_node_outside_the_tree_is_an_error(tree):
    with pytest.raises(ValueError, match="accepted: expected node indices below 5, got 5"):
        viz.draw_tree(tree, accepted=[5])


@pytest.mark.parametrize(("text", "shown"), [("a b", "a␣b"), ("\n", "⏎"), ("\t", "⇥"), ("\x00", "\\x00"), ("é", "é")])
def test_readable(text: str, shown: str):
    assert viz.readable(text) == shown


@st.composite
def parents(draw) -> list[int]:
    size = draw(st.integers(1, 40))
    return [-1] + [draw(st.integers(0, i - 1)) for i in range(1, size)]


@settings(max_examples=50, deadline=None)
@given(parents())
def test_columns_never_put_two_nodes_of_a_depth_in_one_place(parent: list[int]):
    columns = _columns(parent)
    depth = [0] * len(parent)
    for node in range(1, len(parent)):
        depth[node] = depth[parent[node]] + 1
    places = list(zip(depth, columns, strict=True))
    assert len(set(places)) == len(places)
    for node in range(len(parent)):
        children = [columns[c] for c, p in enumerate(parent) if p == node]
        assert not children or min(children) <= columns[node] <= max(children)
