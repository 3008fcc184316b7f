"""The drawn mask is the tree's visibility."""

from __future__ import annotations

import numpy as np

from kdtree_nb import viz
from kdtree_nb.viz.mask import _visibility


def test_mask_equals_the_ancestor_bits(tree):
    for stream in range(2):
        count = int(tree.num_nodes[stream])
        drawn = _visibility(tree.parent[stream, :count].tolist())
        assert (drawn == tree.visibility(stream).numpy()).all()


def test_filled_pixels_are_the_visible_keys(tree):
    pixels = viz.draw_mask(tree).axes[0].get_images()[0].get_array()
    assert ((pixels[..., 3] > 0) == tree.visibility(0).numpy()).all()


def test_a_prefix_is_seen_by_every_node(tree):
    fig = viz.draw_mask(tree, prefix_len=12)
    pixels = np.asarray(fig.axes[0].get_images()[0].get_array())
    assert pixels.shape[1] == 5 + 4
    assert (pixels[:, :4, 3] == 1).all()
    assert any("12 keys" in text.get_text() for text in fig.axes[0].texts)


def test_labels(tree):
    ticks = viz.draw_mask(tree, decode=lambda ids: chr(ids[0])).axes[0].get_yticklabels()
    assert [tick.get_text() for tick in ticks] == ["A", "B", "⏎", "D", "␣"]
