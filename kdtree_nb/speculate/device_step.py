"""One decode step as a chain of operations whose counts stay on the device, from a tree to the state behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from kdtree_nb.drafters import AttachedDrafter, DeviceDrafter
from kdtree_nb.drafters.base import likeliest
from kdtree_nb.model import LatentCache, Model
from kdtree_nb.native import ops
from kdtree_nb.speculate.features import remember_accepted
from kdtree_nb.speculate.mode import Mode
from kdtree_nb.speculate.sampling import Choose
from kdtree_nb.tree import DraftTree


class Step(NamedTuple):
    """What a step computed on the way: logits f32 [T, V], target_token i64 [T], path i32 [S, L], its tree."""

    logits: torch.Tensor
    target_token: torch.Tensor
    path: torch.Tensor
    tree: DraftTree


MakeTree = Callable[[], DraftTree]
"""Makes the trees of a step from what lies on the device by then."""


def take_step(
    model: Model, cache: LatentCache, reader: AttachedDrafter | None, state: ops.StreamState, is_stop: torch.Tensor,
    choose: Choose, make_tree: MakeTree, max_depth: int, ring: ops.StepRing,
) -> Step:  # fmt: skip
    """Verify, accept, compact, commit. Nothing here depends on a value, so that the host need not wait for one.

    reader: a drafter that wants hidden states
    """
    tree = make_tree()
    rows = ops.tree_rows_padded(tree, state.prefix_len)
    hidden = dict.fromkeys(reader.feature_layers if reader else ())
    logits = model.forward(rows, tree, cache, state.prefix_len, hidden=hidden)
    target_token = choose(logits, rows)
    path, num_accepted, _ = ops.tree_accept(tree, target_token, max_depth, rows.begin)
    if reader:
        begin, prefix_len, active = rows.begin, state.prefix_len, state.active
        remember_accepted(reader, hidden.values(), begin, prefix_len, path, num_accepted, active)
    if max_depth > 0:
        cache.compact(state.prefix_len, path, num_accepted)
    ops.step_commit(state, ring, path, num_accepted, tree.num_nodes, target_token, rows.begin, is_stop)
    return Step(logits, target_token, path, tree)


def root_trees(state: ops.StreamState) -> DraftTree:
    """A root, the bonus token, for each active stream: AR decoding. The trees are `state` itself, so they follow it."""
    token = state.bonus.unsqueeze(1)
    parent = torch.full_like(token, -1, dtype=torch.int32)
    score = torch.zeros_like(token, dtype=torch.float64)
    return DraftTree(token, parent, parent + 1, score, torch.ones_like(token).unsqueeze(2), state.active)


def drafted_trees(
    model: Model, drafter: DeviceDrafter, state: ops.StreamState, budget: torch.Tensor, max_budget: int,
    depth: torch.Tensor, mode: Mode,
) -> DraftTree:  # fmt: skip
    """The trees of a drafter on the device: budget i32 [S], depth i32 [1, L, 1] = 1 … L.

    No node lies deeper than its stream may still emit. NaN logits give their stream a tree of no nodes, which
    step_commit reports: that stream ends there, the others' steps go on. Raises ValueError for logits of another shape.
    """
    logits, vocab_size = drafter.draft_on_device(state), model.config.vocab_size
    expected = [len(budget), depth.shape[1], vocab_size]
    if list(logits.shape) not in (expected, [*expected[:2], model.head.num_out]):
        raise ValueError(
            f"draft: {type(drafter).__name__}: expected logits [S, L, V] = {expected}, got {list(logits.shape)}"
        )
    num_candidates = mode.num_candidates(max_budget, vocab_size)
    log_probs, token_ids = likeliest(model.ranks, logits, vocab_size, num_candidates)
    log_probs.masked_fill_(depth >= state.remaining[:, None, None], -torch.inf)
    tree = _build(log_probs, token_ids, state.bonus, budget, max_budget)
    tree.num_nodes.mul_(state.active)
    if mode.cutter:
        tree.num_nodes.copy_(mode.cutter.on_device(tree, state.active, state.prefix_len))
    return tree


def _build(
    log_probs: torch.Tensor, token_ids: torch.Tensor, bonus: torch.Tensor, budget: torch.Tensor, max_budget: int
) -> DraftTree:  # fmt: skip
    """`tree_build`, by which a stream whose candidates hold a NaN gets a tree of no nodes, as the operation gives it on
    a GPU; on a CPU it would refuse the trees of all."""
    if log_probs.is_cuda:
        return ops.tree_build(log_probs, token_ids, bonus, budget, max_budget)
    is_bad = log_probs.isnan().flatten(1).any(1)
    log_probs.masked_fill_(is_bad[:, None, None], -torch.inf)
    tree = ops.tree_build(log_probs, token_ids, bonus, budget, max_budget)
    tree.num_nodes.masked_fill_(is_bad, 0)
    return tree


class TreeBuffer:
    """Trees that the host fills and a step reads: S trees of N slots, brought to the device by one copy.

    tree: the same memory at every step, to be captured; its scores and ancestor bits are not filled
    """

    def __init__(self, num_streams: int, num_slots: int, device: torch.device) -> None:
        shape = (num_streams, num_slots)
        self._sizes = [(torch.int64, shape), (torch.int32, shape), (torch.int32, shape), (torch.int32, shape[:1])]
        num_bytes = sum(dtype.itemsize * torch.Size(size).numel() for dtype, size in self._sizes)
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=on_gpu)
        self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=device) if on_gpu else self._host
        self._fields = self._views(self._host)
        token, parent, depth, num_nodes = self._views(self._device)
        score = torch.zeros(1, 1, dtype=torch.float64, device=device).expand(shape)
        self.tree = DraftTree(token, parent, depth, score, torch.zeros_like(token[:1, :1, None]), num_nodes)

    def _views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        sizes = [dtype.itemsize * torch.Size(size).numel() for dtype, size in self._sizes]
        parts = memory.split(sizes)
        return [part.view(dtype).view(size) for part, (dtype, size) in zip(parts, self._sizes, strict=True)]

    def put(self, tree: DraftTree) -> None:
        """Copy trees of at most N nodes, which lie on the host. The last ones must have been verified by now."""
        num_slots = self.tree.token.shape[1]
        for to, field in zip(self._fields, (tree.token, tree.parent, tree.depth), strict=False):
            used = field[:, :num_slots]
            to[:, : used.shape[1]].copy_(used)
        self._fields[3].copy_(tree.num_nodes)
        if self._device is not self._host:
            self._device.copy_(self._host, non_blocking=True)
