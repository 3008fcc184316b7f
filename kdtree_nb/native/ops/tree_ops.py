"""Operations on draft trees: thin typed faces over the native operators, and their fake kernels.

Wrong types, shapes and values raise ValueError in the native binding; a face only orders arguments. On a GPU values are
not looked at, since the host would have to wait for them: bad logits give NaN log-probs, bad candidates, budgets and
bonus tokens a tree of num_nodes 0; only tree_rows waits, for the counts that size its result.
B streams, L draft depth, K candidates per depth, V vocabulary, N = 1 + max_budget tree slots, T rows of one pass.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from kdtree_nb.native.ops.namespace import native
from kdtree_nb.tree import DraftTree


class Rows(NamedTuple):
    """The T rows of one forward pass: the nodes of stream 0, then those of stream 1, …

    stream:   i32 [T]
    node:     i32 [T]
    position: i32 [T]  in the text: prefix_len + depth
    slot:     i32 [T]  in the cache: prefix_len + node
    token:    i64 [T]
    begin:    i32 [B]  the first row of each stream, or None
    num_rows: i32 [1]  rows in use, the others hold -1 everywhere; or None where all T are
    """

    stream: Tensor
    node: Tensor
    position: Tensor
    slot: Tensor
    token: Tensor
    begin: Tensor | None = None
    num_rows: Tensor | None = None


def draft_topk(logits: Tensor, num_candidates: int) -> tuple[Tensor, Tensor]:
    """Log-softmax over V and its K largest: f32 or bf16 [B, L, V] -> log_probs f32 [B, L, K], token_ids i64 [B, L, K].

    Largest first, the lower id first among equal logits; log-probs are never above 0. A logit of -inf has log-prob
    -inf. Raises ValueError for NaN or +inf, naming stream and depth, and for num_candidates outside 1 … V.
    """
    return native.draft_topk(logits, num_candidates)


def tree_build(
    log_probs: Tensor, token_ids: Tensor, bonus: Tensor, budget: int | Tensor, max_budget: int | None = None
) -> DraftTree:
    """The trees of the budget[b] heaviest prefixes, nodes in best-first order.

    log_probs f32 [B, L, K] and token_ids i64 [B, L, K]: the candidates of each depth, best first. bonus i64 [B]: the
    root tokens. budget: one int, or i32 [B], nodes besides the root. max_budget sizes the arrays; by default the
    largest budget. Raises ValueError for budgets outside 0 … max_budget ≤ 1023, and for a row of candidates that is
    NaN, positive, increasing or repeats a token id.
    """
    if isinstance(budget, int):
        if max_budget is None:
            max_budget = budget
        budget = _budget_tensor(budget, bonus.numel(), bonus.device)
    elif not isinstance(budget, Tensor):
        raise ValueError(f"tree_build: budget: expected an int or an i32 tensor [B], got {budget!r}")
    elif max_budget is None:
        max_budget = int(budget.max()) if budget.numel() else 0
    return DraftTree(*native.tree_build(log_probs, token_ids, bonus, budget, max_budget))


@functools.lru_cache(maxsize=64)
def _budget_tensor(budget: int, num_streams: int, device: torch.device) -> Tensor:
    """The same budget for every stream, i32 [B]. Kept, because making it takes a third as long as building the tree."""
    return torch.full((num_streams,), max(-1, min(budget, 2**31 - 1)), dtype=torch.int32, device=device)


def tree_rows(tree: DraftTree, prefix_len: Tensor) -> Rows:
    """One row per node in use: prefix_len i32 [B] -> Rows. A stream with num_nodes 0 gives no row.

    Raises ValueError for counts, depths or prefix lengths outside their ranges.
    """
    return Rows(*native.tree_rows(tree.token, tree.depth, tree.num_nodes, prefix_len))


def tree_rows_padded(tree: DraftTree, prefix_len: Tensor) -> Rows:
    """`tree_rows` without waiting for the number of rows: always B * N rows, of which the first num_rows are in use.

    Given that number, the operations of a forward pass do nothing for the rows behind, whose results are never read.
    """
    stream, node, position, slot, token, begin, num_rows = native.tree_rows_padded(
        tree.token, tree.depth, tree.num_nodes, prefix_len
    )
    return Rows(stream, node, position, slot, token, begin, num_rows)


def tree_accept(
    tree: DraftTree, target_token: Tensor, max_depth: int, row_begin: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """From the root, follow the child whose token is the target's choice at the current node.

    target_token: the target's next token at every node, i64 [B, N]; or at every row, i64 [T], where row_begin i32 [B]
    says which row each stream's root is -> (accepted_path i32 [B, max_depth] node indices without the root, padded
    with -1; num_accepted i32 [B]; next_token i64 [B], the first choice that has no child). A stream with num_nodes 0
    accepts nothing and has next_token -1. Raises ValueError for an invalid parent and for an accepted path longer than
    max_depth.
    """
    return native.tree_accept(tree.token, tree.parent, tree.num_nodes, target_token, max_depth, row_begin)


@native.fake
def draft_topk_fake(logits: Tensor, num_candidates: int) -> tuple[Tensor, Tensor]:
    shape = (*logits.shape[:-1], num_candidates)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int64)


@native.fake
def tree_build_fake(log_probs: Tensor, token_ids: Tensor, bonus: Tensor, budget: Tensor, max_budget: int):
    num_streams, num_slots = log_probs.shape[0], max_budget + 1
    shape = (num_streams, num_slots)
    return (
        bonus.new_empty(shape),
        bonus.new_empty(shape, dtype=torch.int32),
        bonus.new_empty(shape, dtype=torch.int32),
        bonus.new_empty(shape, dtype=torch.float64),
        bonus.new_empty((*shape, (num_slots + 63) // 64)),
        bonus.new_empty((num_streams,), dtype=torch.int32),
    )


@native.fake
def tree_rows_fake(token: Tensor, depth: Tensor, num_nodes: Tensor, prefix_len: Tensor):
    num_rows = torch.library.get_ctx().new_dynamic_size()
    return (*(depth.new_empty((num_rows,)) for _ in range(4)), token.new_empty((num_rows,)))


@native.fake
def tree_rows_padded_fake(token: Tensor, depth: Tensor, num_nodes: Tensor, prefix_len: Tensor):
    num_rows = token.shape[0] * token.shape[1]
    rows = (*(depth.new_empty((num_rows,)) for _ in range(4)), token.new_empty((num_rows,)))
    return (*rows, depth.new_empty((token.shape[0],)), depth.new_empty((1,)))


@native.fake
def tree_accept_fake(
    token: Tensor, parent: Tensor, num_nodes: Tensor, target_token: Tensor, max_depth: int,
    row_begin: Tensor | None = None,
):  # fmt: skip
    num_streams = token.shape[0]
    return (
        parent.new_empty((num_streams, max_depth)),
        parent.new_empty((num_streams,)),
        token.new_empty((num_streams,)),
    )
