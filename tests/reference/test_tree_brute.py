"""The brute-force oracle itself, on a case worked by hand."""

from __future__ import annotations

import numpy as np

from kdtree_nb.reference import all_prefixes, tree_brute


def test_all_prefixes():
    score, ranks = all_prefixes(np.float32([[-1, -2], [-0.5, -4]]))
    assert {tuple(r): s for r, s in zip(ranks.tolist(), score, strict=True)} == {
        (0, -1): -1, (1, -1): -2, (0, 0): -1.5, (0, 1): -5, (1, 0): -2.5, (1, 1): -6,
    }  # fmt: skip
    assert len(all_prefixes(np.zeros((4, 3)))[0]) == 3 + 9 + 27 + 81
    assert all_prefixes(np.zeros((0, 3)))[1].shape == (0, 0)


def test_by_hand():
    log_probs = np.float32([[[-1, -2], [-0.5, -4]]])
    tree = tree_brute(log_probs, np.array([[[7, 0], [8, 9]]]), np.array([3]), np.array([5]))
    assert tree.token.tolist() == [[3, 7, 8, 0, 8, 9]]
    assert tree.parent.tolist() == [[-1, 0, 1, 0, 3, 1]]
    assert tree.depth.tolist() == [[0, 1, 2, 1, 2, 2]]
    assert tree.log_prob.tolist() == [[0, -1, -1.5, -2, -2.5, -5]]
