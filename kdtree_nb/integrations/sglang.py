"""SGLang's tree verification: a DraftTree to and from its arrays, and its greedy walk in numpy.

The conventions are facts read in the public repository sgl-project/sglang, of which no code is used here:

- links, walk and outputs: sgl-kernel/csrc/speculative/eagle_utils.cu, commit 29bd4e859f6e
- names, shapes, mask modes: python/sglang/srt/speculative/eagle_utils.py, commit 003ddbce039c
- links from a mask: python/sglang/kernels/ops/speculative/reconstruct_tree.py, commit 5102293714e2

Every stream has the same number of nodes there, n = draft_token_num, so smaller trees get fillers behind them. A
filler has no links and is never accepted; it holds token 0, which every embedding knows, sits at position prefix_len,
and sees the prefix and itself, so that its softmax is finite. It must not see the root: an engine that derives the
links from the mask would take it for a child of the root, and could accept it.

Tested against the published rules by simulation; nothing here has run inside SGLang.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kdtree_nb.config import MAX_BUDGET
from kdtree_nb.integrations import tree_arrays as arrays
from kdtree_nb.native.threads import on_this_thread
from kdtree_nb.tree import DraftTree


class TreeMaskMode(enum.IntEnum):
    """What a tree mask holds, under the numbers that SGLang gives these forms."""

    FULL_MASK = 0
    QLEN_ONLY = 1
    QLEN_ONLY_BITPACKING = 2


@dataclasses.dataclass(frozen=True)
class VerifyLayout:
    """B trees of n = draft_token_num nodes each, fillers included.

    draft_token:           i64 [B*n]   token of every row of the verify pass
    positions:             i64 [B*n]   prefix_len + depth
    retrieve_index:        i64 [B, n]  row of every node: b*n + node
    retrieve_next_token:   i64 [B, n]  first child, as a node index; -1: a leaf
    retrieve_next_sibling: i64 [B, n]  next child of the same parent; -1: the last
    tree_mask:             True or bit 1 where a row sees a key
        FULL_MASK             bool [sum of n*(prefix_len[b] + n)]: per stream, row-major [n, prefix_len + n]
        QLEN_ONLY             bool [B*n*n]: the same without the prefix
        QLEN_ONLY_BITPACKING  [B*n, words]: bit j of a row, lowest bit first: one u8 for n up to 8, one u16 up to 16,
                              one u32 up to 32, as there; beyond that ceil(n/32) u32, which is our extension
    mask_mode:             which of these
    """

    draft_token: Tensor
    positions: Tensor
    retrieve_index: Tensor
    retrieve_next_token: Tensor
    retrieve_next_sibling: Tensor
    tree_mask: Tensor
    mask_mode: TreeMaskMode

    @property
    def draft_token_num(self) -> int:
        """n, the rows of every stream."""
        return self.retrieve_index.shape[1]


class Verdict(NamedTuple):
    """What the greedy verify kernel writes, S = spec_steps + 1. Rows are flat: b*n + node.

    predicts:         i32 [B*n]   the target's token at the rows of the accepted path, root included; others unwritten
    accept_index:     i32 [B, S]  rows of the accepted path, root first; padded with -1
    accept_token_num: i32 [B]     accepted nodes, root excluded
    """

    predicts: np.ndarray
    accept_index: np.ndarray
    accept_token_num: np.ndarray


def to_verify_layout(
    tree: DraftTree,
    prefix_len: Tensor,
    draft_token_num: int | None = None,
    mask_mode: TreeMaskMode = TreeMaskMode.FULL_MASK,
    total_prefix_len: int | None = None,
) -> VerifyLayout:
    """Lay out B trees for SGLang's verify pass, on the device of the tree.

    prefix_len int [B]: cached tokens per stream, the bonus token not counted. draft_token_num: n, at least the largest
    num_nodes; by default the slots of the tree. total_prefix_len: the sum of prefix_len, which sizes a FULL_MASK; where
    it is not given the host waits for it. Raises ValueError for wrong shapes, and on a CPU for a stream without a root,
    more nodes than n, an invalid parent, a negative prefix_len and equal tokens among siblings; on a GPU, values are
    not looked at.
    """
    n = tree.max_budget + 1 if draft_token_num is None else draft_token_num
    mask_mode = TreeMaskMode(mask_mode)
    if not 1 <= n <= MAX_BUDGET + 1:
        raise ValueError(f"to_verify_layout: draft_token_num: expected 1 … {MAX_BUDGET + 1}, got {n}")
    arrays.check_prefix_len("to_verify_layout", prefix_len, tree.num_streams)
    if tree.token.device.type == "cpu":
        arrays.check_tree("to_verify_layout", tree, n)
    with on_this_thread() if tree.token.device.type == "cpu" else contextlib.nullcontext():
        return _laid_out(tree, prefix_len, n, mask_mode, total_prefix_len)


def _laid_out(
    tree: DraftTree, prefix_len: Tensor, n: int, mask_mode: TreeMaskMode, total_prefix_len: int | None
) -> VerifyLayout:
    in_use = torch.arange(n, device=tree.token.device) < tree.num_nodes.unsqueeze(1)
    token = arrays.to_width(tree.token, n).masked_fill(~in_use, 0)
    parent = arrays.to_width(tree.parent, n).long().masked_fill(~in_use, -1)
    depth = arrays.to_width(tree.depth, n).long().masked_fill(~in_use, 0)
    first_child, next_sibling = arrays.links(parent)
    return VerifyLayout(
        draft_token=token.flatten(),
        positions=(prefix_len.long().unsqueeze(1) + depth).flatten(),
        retrieve_index=torch.arange(token.numel(), device=token.device).view(token.shape),
        retrieve_next_token=first_child,
        retrieve_next_sibling=next_sibling,
        tree_mask=_tree_mask(arrays.row_bytes(tree, in_use), prefix_len, mask_mode, total_prefix_len),
        mask_mode=mask_mode,
    )


def to_draft_tree(layout: VerifyLayout, prefix_len: Tensor, log_prob: Tensor | None = None) -> DraftTree:
    """The DraftTree that a layout describes, with n slots: the inverse of `to_verify_layout`.

    prefix_len int [B]. log_prob f64 [B, n]: scores of the nodes, which the layout does not hold; without them every
    node counts as certain, 0. Raises ValueError where links, positions and mask contradict each other, nodes in use
    have fillers in front of them, or siblings hold equal tokens. Looks at values: on a GPU the host waits.
    """
    shape = layout.retrieve_index.shape
    arrays.check_prefix_len("to_draft_tree", prefix_len, shape[0])
    if log_prob is not None and log_prob.shape != shape:
        raise ValueError(f"to_draft_tree: log_prob: expected shape {[*shape]}, got {[*log_prob.shape]}")
    parent = arrays.parents("to_draft_tree", layout.retrieve_next_token, layout.retrieve_next_sibling)
    in_use = parent >= 0
    in_use[:, 0] = True
    bits = arrays.ancestor_bits(parent).masked_fill(~in_use.unsqueeze(2), 0)
    depth = arrays.unpacked(bits.view(torch.uint8), shape[1]).sum(2) - 1
    num_nodes = in_use.sum(1)
    score = torch.zeros(shape, dtype=torch.float64, device=parent.device) if log_prob is None else log_prob.double()
    tree = DraftTree(
        layout.draft_token.view(shape).masked_fill(~in_use, -1),
        parent.int(),
        depth.int(),
        score.masked_fill(~in_use, -torch.inf),
        bits,
        num_nodes.int(),
    )
    arrays.check_tree("to_draft_tree", tree, shape[1])
    _check_agreement(layout, to_verify_layout(tree, prefix_len, shape[1], layout.mask_mode))
    return tree


def verify_tree_greedy(layout: VerifyLayout, target_predict: np.ndarray, num_spec_step: int) -> Verdict:
    """What SGLang's greedy verify kernel computes, step by step, in numpy.

    target_predict int [B, n]: the target's next token at every node. num_spec_step: S, the columns of accept_index; it
    ends a walk of S - 1 accepted nodes, silently. Rows of predicts that the kernel leaves unwritten hold -1 here.
    Raises ValueError for another shape, and for S below 1.
    """
    B, n = layout.retrieve_index.shape
    if target_predict.shape != (B, n) or num_spec_step < 1:
        raise ValueError(
            f"verify_tree_greedy: expected target_predict of shape [{B}, {n}] and num_spec_step of at least 1, "
            f"got {[*target_predict.shape]} and {num_spec_step}"
        )
    row_of, first_child, next_sibling = (
        t.cpu().numpy() for t in (layout.retrieve_index, layout.retrieve_next_token, layout.retrieve_next_sibling)
    )
    candidate, target = layout.draft_token.cpu().numpy().reshape(B, n), target_predict.ravel()
    predicts, accept_token_num = np.full(B * n, -1, np.int32), np.zeros(B, np.int32)
    accept_index = np.full((B, num_spec_step), -1, np.int32)
    for b in range(B):
        last, node = row_of[b, 0], 0
        accept_index[b, 0] = last
        for step in range(1, num_spec_step):
            node = first_child[b, node]
            while node != -1 and candidate[b, node] != target[last]:
                node = next_sibling[b, node]
            if node == -1:
                break
            predicts[last] = target[last]
            last = row_of[b, node]
            accept_index[b, step] = last
            accept_token_num[b] = step
        predicts[last] = target[last]
    return Verdict(predicts, accept_index, accept_token_num)


def to_accepted(verdict: Verdict, draft_token_num: int) -> tuple[Tensor, Tensor, Tensor]:
    """The verdict as `ops.tree_accept` would give it, for `ops.cache_compact`.

    -> (accepted_path i32 [B, S - 1] node indices without the root, padded with -1; num_accepted i32 [B]; next_token
    i64 [B]). Raises ValueError if a stream's row is not its own, or its root was not accepted.
    """
    accept_index, count = verdict.accept_index.astype(np.int64), verdict.accept_token_num
    begin = draft_token_num * np.arange(len(accept_index))
    node = accept_index - begin[:, None]
    own = (accept_index == -1) | ((node >= 0) & (node < draft_token_num))
    if not own.all() or (node[:, 0] != 0).any():
        raise ValueError(
            f"to_accepted: accept_index: expected a root and rows of the stream's own {draft_token_num}, "
            f"got {accept_index.tolist()}"
        )
    path = np.where(accept_index == -1, -1, node)[:, 1:].astype(np.int32)
    last = np.take_along_axis(accept_index, count[:, None].astype(np.int64), 1)[:, 0]
    next_token = verdict.predicts[last].astype(np.int64)
    return torch.from_numpy(path), torch.from_numpy(count.astype(np.int32)), torch.from_numpy(next_token)


def _tree_mask(row_bytes: Tensor, prefix_len: Tensor, mode: TreeMaskMode, total_prefix_len: int | None) -> Tensor:
    """The mask of `VerifyLayout` from the bits u8 [B, n, bytes] by which every row sees the nodes."""
    B, n, num_bytes = row_bytes.shape
    if mode == TreeMaskMode.QLEN_ONLY_BITPACKING:
        word = {1: torch.uint8, 2: torch.uint16}.get(num_bytes, torch.uint32)
        return row_bytes.view(word).flatten(0, 1)
    visible = arrays.unpacked(row_bytes, n)
    if mode == TreeMaskMode.QLEN_ONLY:
        return visible.flatten()
    prefix_len = prefix_len.long()
    total = int(prefix_len.sum()) if total_prefix_len is None else total_prefix_len
    if total_prefix_len is not None and prefix_len.device.type == "cpu" and total != int(prefix_len.sum()):
        raise ValueError(
            f"to_verify_layout: total_prefix_len: expected the sum of prefix_len, {int(prefix_len.sum())}, got {total}"
        )
    node = torch.arange(n, device=row_bytes.device)
    width = prefix_len + n
    begin = n * (width.cumsum(0) - width) + prefix_len  # of the node columns in the first row of every stream
    place = begin.view(B, 1, 1) + node.view(n, 1) * width.view(B, 1, 1) + node
    mask = torch.ones(n * total + B * n * n, dtype=torch.bool, device=row_bytes.device)
    return mask.scatter_(0, place.flatten(), visible.flatten())


def _check_agreement(given: VerifyLayout, expected: VerifyLayout) -> None:
    """That a layout holds what its links imply: expected is what their tree is laid out to."""
    for field in dataclasses.fields(VerifyLayout)[:-1]:
        got, want = getattr(given, field.name), getattr(expected, field.name)
        if got.shape != want.shape or got.dtype != want.dtype:
            raise ValueError(
                f"to_draft_tree: {field.name}: expected {want.dtype} {[*want.shape]}, got {got.dtype} {[*got.shape]}"
            )
        differs = (got.view(torch.uint8) != want.view(torch.uint8)).flatten().nonzero()
        if len(differs):
            place = int(differs[0]) // got.element_size()
            implied, found = (t.flatten()[place].item() for t in (want, got))
            raise ValueError(
                f"to_draft_tree: {field.name}: element {place}: expected {implied}, as the links imply, got {found}"
            )
