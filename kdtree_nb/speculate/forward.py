"""TreeForward: the target's forward over the trees of a batch, captured once per shape and then replayed."""

from __future__ import annotations

import dataclasses
import functools

import torch

from kdtree_nb.model import LatentCache, Model
from kdtree_nb.native import ops
from kdtree_nb.native.capture import Capture
from kdtree_nb.tree import DraftTree

MAX_CAPTURED_ROWS = 33
"""Forwards of more rows are not captured: their kernels take longer than the way to them."""

Choice = tuple[torch.Tensor, torch.Tensor]
"""Logits f32 [T, V] and the greedy token i64 [T] of every row."""


def forward(model: Model, cache: LatentCache, prefix_len: torch.Tensor, tree: DraftTree) -> Choice:
    """One forward over the rows of `tree` behind the first prefix_len i32 [S] slots of `cache`."""
    logits = model.forward(ops.tree_rows(tree, prefix_len), tree, cache, prefix_len)
    return logits, ops.argmax(logits)


class TreeForward:
    """`forward` for one batch: always the same cache and prefix_len, whose contents change from step to step."""

    def __init__(self, model: Model, cache: LatentCache, prefix_len: torch.Tensor) -> None:
        self._forward = functools.partial(forward, model, cache, prefix_len)
        self._captures: dict[tuple[int, int], tuple[DraftTree, Capture[Choice]]] = {}

    def __call__(self, tree: DraftTree, num_rows: int) -> Choice:
        """The target's choice after each of the `num_rows` nodes in use. The next call may overwrite what is returned.

        Raises ValueError on a token outside the vocabulary or a full cache.
        """
        if num_rows > MAX_CAPTURED_ROWS:
            return self._forward(tree)
        shape = (tree.max_budget, num_rows)
        if shape not in self._captures:
            fixed = _copy(tree)
            self._captures[shape] = fixed, Capture(functools.partial(self._forward, fixed))
            return self._captures[shape][1].result
        fixed, capture = self._captures[shape]
        fixed.token.copy_(tree.token)
        fixed.parent.copy_(tree.parent)
        fixed.depth.copy_(tree.depth)
        fixed.num_nodes.copy_(tree.num_nodes)
        return capture.result if capture.replay() else self._forward(tree)


def _copy(tree: DraftTree) -> DraftTree:
    """`tree` with its own copies of the tensors that a forward reads."""
    names = ("token", "parent", "depth", "num_nodes")
    return dataclasses.replace(tree, **{name: getattr(tree, name).clone() for name in names})
