"""TreeForward: the target's forward over the trees of a batch, captured once per shape and then replayed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable
from typing import NamedTuple

import torch

from kdtree_nb.model import LatentCache, Model
from kdtree_nb.native import ops
from kdtree_nb.native.capture import Capture
from kdtree_nb.speculate.features import Features
from kdtree_nb.speculate.sampling import Choose, Chooser
from kdtree_nb.tree import DraftTree

MAX_CAPTURED_ROWS = 33
"""Forwards of more rows are not captured: their kernels take longer than the way to them."""

MAX_CAPTURES = 64
"""Shapes that are kept at a time."""

SLOT_UNIT = 256
"""A cache has a multiple of this many slots per stream."""


class Choice(NamedTuple):
    """Logits f32 [T, V], the token i64 [T] chosen after every row, hidden states float [T, D] after some layers."""

    logits: torch.Tensor
    token: torch.Tensor
    hidden: tuple[torch.Tensor, ...] = ()


def forward(
    model: Model, cache: LatentCache, prefix_len: torch.Tensor, tree: DraftTree, choose: Choose | None = None,
    layers: tuple[int, ...] = (),
) -> Choice:  # fmt: skip
    """One forward over the rows of `tree` behind the first prefix_len i32 [S] slots of `cache`.

    choose: by default the argmax
    layers: those whose output is kept
    """
    rows, hidden = ops.tree_rows(tree, prefix_len), dict.fromkeys(layers)
    logits = model.forward(rows, tree, cache, prefix_len, hidden=hidden)
    token = choose(logits, rows) if choose else model.ranks.argmax(logits, model.config.vocab_size, rows.num_rows)
    return Choice(logits, token, tuple(hidden.values()))


class TreeForward:
    """`forward` on one cache and prefix_len, whose contents change from step to step and from text to text."""

    def __init__(self, model: Model, cache: LatentCache, prefix_len: torch.Tensor) -> None:
        self.model, self.cache, self.prefix_len = model, cache, prefix_len
        self.tree_device = model.device
        self.choose = Chooser(len(prefix_len), model)
        self.features = Features(model, cache)
        self._forward = functools.partial(forward, model, cache, prefix_len, choose=self.choose)
        self._addresses = addresses(model)
        self._storages = [t.untyped_storage() for t in model.tensors()]  # captured calls read them: they must stay
        is_captured = model.device.type == "cpu" and model.ranks.only_ops
        self._max_captured_rows = MAX_CAPTURED_ROWS if is_captured else 0
        self._captures: dict[Hashable, tuple[DraftTree, Capture[Choice]]] = {}

    @classmethod
    def allocate(cls, model: Model, num_streams: int, num_slots: int) -> TreeForward:
        """One with a cache of its own of at least num_slots slots, rounded up so that later texts may use it."""
        num_slots = -(-num_slots // SLOT_UNIT) * SLOT_UNIT
        cache = model.new_cache(num_streams, num_slots)  # first, since it says what does not fit
        return cls(model, cache, torch.zeros(num_streams, dtype=torch.int32, device=model.device))

    def fits(self, model: Model, num_streams: int, num_slots: int) -> bool:
        """Whether the next batch can use it: it is large enough, and the model's weights are those captured."""
        cache = self.cache
        fits = cache.num_streams == num_streams and cache.num_slots >= num_slots
        return fits and self.model is model and self._addresses == addresses(model)

    def prefill(self, tree: DraftTree) -> None:
        """Append the rows of trees without branches to the cache and to the prefix."""
        rows, hidden = ops.tree_rows(tree, self.prefix_len), dict.fromkeys(self.features.layers)
        self.model.forward(rows, tree, self.cache, self.prefix_len, need_logits=False, hidden=hidden)
        self.features.remember(hidden.values(), rows.stream, rows.position)
        self.prefix_len.add_(tree.num_nodes)

    def __call__(self, tree: DraftTree, num_rows: int) -> Choice:
        """The target's choice after each of the `num_rows` nodes in use. The next call may overwrite what is returned.

        Raises ValueError on a token outside the vocabulary or a full cache.
        """
        layers = self.features.layers
        if num_rows > self._max_captured_rows:
            return self._forward(tree, layers=layers)
        shape = (tree.max_budget, num_rows, torch.get_num_threads(), self.choose.kind, layers)
        if shape not in self._captures:
            if len(self._captures) == MAX_CAPTURES:
                self._captures.clear()
            fixed = _copy(tree)
            self._captures[shape] = fixed, Capture(functools.partial(self._forward, fixed, layers=layers))
            return self._captures[shape][1].result
        fixed, capture = self._captures[shape]
        fixed.token.copy_(tree.token)
        fixed.parent.copy_(tree.parent)
        fixed.depth.copy_(tree.depth)
        fixed.num_nodes.copy_(tree.num_nodes)
        return capture.result if capture.replay() else self._forward(tree, layers=layers)


def addresses(model: Model) -> list[int]:
    """Where everything lies that a captured forward reads: other addresses mean other weights."""
    return [tensor.data_ptr() for tensor in model.tensors()]


def _copy(tree: DraftTree) -> DraftTree:
    """`tree` with its own copies of the tensors that a forward reads."""
    names = ("token", "parent", "depth", "num_nodes")
    return dataclasses.replace(tree, **{name: getattr(tree, name).clone() for name in names})
