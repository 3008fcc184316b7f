"""Operations on the streams of a batch: what a verified step emits, and the state that the next step starts from.

S streams, L longest accepted path, T rows of the step, P text slots, R records, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kdtree_nb.native.ops.namespace import native

RECORD_FIELDS = ("num_nodes", "num_accepted", "num_emitted", "status")
"""What a record holds per stream in front of the emitted tokens."""

NO_TREE, NAN_LOGITS = 1, 2
"""Statuses in a record: an active stream's tree had no nodes; the choice behind the emitted tokens was -1."""


class StreamState(NamedTuple):
    """Where S streams stand, in memory that a step reads and writes.

    prefix_len: i32 [S]     tokens whose rows the cache holds
    bonus:      i64 [S]     the last committed token, the next tree's root
    remaining:  i32 [S]     tokens that may still be emitted
    active:     i32 [S]     1, or 0 once a stream has ended
    text:       i64 [S, P]  committed tokens; text[s, prefix_len[s]] is the bonus token
    """

    prefix_len: Tensor
    bonus: Tensor
    remaining: Tensor
    active: Tensor
    text: Tensor


class StepRing(NamedTuple):
    """The records of the last R steps.

    records: i64 [R, 4 + 1 + L, S]  per stream the RECORD_FIELDS, then the emitted tokens, padded with -1
    step:    i64 [1]                steps so far; the next one writes records[step % R]
    """

    records: Tensor
    step: Tensor


def step_commit(
    state: StreamState,
    ring: StepRing,
    accepted_path: Tensor,
    num_accepted: Tensor,
    num_nodes: Tensor,
    target_token: Tensor,
    row_begin: Tensor,
    is_stop: Tensor,
) -> None:
    """Emit the target's choices along the accepted paths and bring `state` up to date, in place; write one record.

    accepted_path i32 [S, L] and num_accepted i32 [S] of `tree_accept`, num_nodes i32 [S] of the trees, target_token
    i64 [T] with the row i32 [S] of each root, is_stop bool [V]: tokens that end the text. Every active stream emits at
    least one token, up to one that ends the text or is its last remaining one; then it is no longer active. A choice of
    -1 (status NAN_LOGITS) and a tree without nodes (NO_TREE) end a stream as well. A stream that is not active emits
    nothing and stays as it is. Raises ValueError on paths, rows or tokens outside their arrays; on a GPU they count as
    NaN.
    """
    native.step_commit(accepted_path, num_accepted, num_nodes, target_token, row_begin, is_stop, *state, *ring)


@native.fake
def step_commit_fake(
    accepted_path: Tensor, num_accepted: Tensor, num_nodes: Tensor, target_token: Tensor, row_begin: Tensor,
    is_stop: Tensor, prefix_len: Tensor, bonus: Tensor, remaining: Tensor, active: Tensor, text: Tensor,
    ring: Tensor, step: Tensor,
) -> None:  # fmt: skip
    return None
