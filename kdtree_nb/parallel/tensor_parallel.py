"""TensorParallel: the operations of a model that need the other ranks, with the bits of one rank."""

from __future__ import annotations

import os

import torch
from torch import Tensor
from torch.nn.functional import pad

from kdtree_nb.config import share_of_rank
from kdtree_nb.errors import KernelUnavailableError
from kdtree_nb.model.ranks import SampleBy
from kdtree_nb.native import ops
from kdtree_nb.native.devices import why_not_on
from kdtree_nb.parallel import vocabulary
from kdtree_nb.parallel.group import Group
from kdtree_nb.parallel.watch import PATIENCE, Patience

MAX_GATHERED_ROWS = 128
"""Partial sums of more rows go to the rank that adds them, instead of all to all ranks. The bits are the same."""


def start(device: str | torch.device = "cpu", patience: Patience = PATIENCE) -> TensorParallel:
    """This process as one rank of those that torchrun has started. "cuda" is the GPU of the process's LOCAL_RANK.

    Raises ValueError without torchrun's environment or for a world size other than 1, 2, 4 or 8, RankError where a rank
    does not come, and KernelUnavailableError for a GPU that is not there or has no kernels.
    """
    device = torch.device(device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) if device.index is None else device.index)
        if why := why_not_on(device):
            raise KernelUnavailableError(f"tensor parallel: {device}: {why}")
        torch.cuda.set_device(device)
    return TensorParallel(Group.start(device, patience))


class TensorParallel:
    """Ranks (see kdtree_nb.model.ranks) over a Group. A rank sums whole segments of a reduction; the ranks' sums are
    exchanged in FP32, added on the same tree as one rank's segments, and rounded once."""

    only_ops = False

    def __init__(self, group: Group) -> None:
        self.group, self.rank, self.num_ranks, self.device = group, group.rank, group.num_ranks, group.device
        self.segments = ops.Segments.of_rank(self.rank, self.num_ranks)

    def __enter__(self) -> TensorParallel:
        self.group.__enter__()
        return self

    def __exit__(self, *of_error: object) -> None:
        self.group.__exit__(*of_error)

    def agree(self, what: str, value: str) -> None:
        """Raises RankError where `value` differs between ranks."""
        self.group.agree(what, value)

    # --- sums --------------------------------------------------------------------------------------------------------

    def linear(
        self, x: Tensor, packed: ops.PackedLinear, whole_in: int, residual: Tensor, num_rows: Tensor | None
    ) -> Tensor:
        """W x + residual from every rank's inputs: x float [T, K'] -> float [T, N]."""
        return self.add(ops.linear_partial(x, packed, whole_in, self.segments, num_rows), residual, num_rows)

    def moe_experts(
        self, x: Tensor, experts: ops.PackedExperts, expert_id: Tensor, weight: Tensor, whole_widths: tuple[int, int],
        residual: Tensor, num_rows: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """The chosen experts' sum + residual from every rank's part of their width: float [T, D]."""
        part = ops.moe_experts_partial(x, experts, expert_id, weight, *whole_widths, self.segments, num_rows)
        return self.add(part, residual, num_rows)

    def add(self, part: Tensor, residual: Tensor, num_rows: Tensor | None) -> Tensor:
        """The sum of the ranks' parts f32 [T, N], rounded to the type of residual float [T, N], + residual."""
        if len(part) <= MAX_GATHERED_ROWS:
            return ops.add_partials(self.group.all_gather(part), residual.dtype, residual, num_rows)
        return self.add_in_blocks(part, residual)

    def add_in_blocks(self, part: Tensor, residual: Tensor) -> Tensor:
        """`add` where every rank adds some of the rows, and they are gathered when they are rounded."""
        num_rows_each = -(-len(part) // self.num_ranks)
        extra = num_rows_each * self.num_ranks - len(part)
        mine = self.group.all_to_all(pad(part, (0, 0, 0, extra)).view(self.num_ranks, num_rows_each, -1))
        begin = self.rank * num_rows_each
        own = pad(residual, (0, 0, 0, extra))[begin : begin + num_rows_each]
        added = self.group.all_gather(ops.add_partials(mine, residual.dtype, own))
        return added.view(-1, part.shape[1])[: len(part)]

    # --- vocabulary --------------------------------------------------------------------------------------------------

    def argmax(self, logits: Tensor, vocab_size: int, num_rows: Tensor | None) -> Tensor:
        """The id of each row's largest logit of all ranks, the lower one on ties, -1 for a NaN: i64 [T]."""
        begin, _ = share_of_rank(vocab_size, self.rank, self.num_ranks)
        words = vocabulary.best_words(logits, ops.argmax(logits, num_rows), begin)
        return vocabulary.token_of(self.group.all_gather(words).amax(0))

    def sample(self, logits: Tensor, vocab_size: int, by: SampleBy, num_rows: Tensor | None) -> Tensor:
        """A token of each row as `ops.sample` draws it from all ranks' logits: i64 [T].

        Every rank names its largest logit; then the token that it would draw where all are kept, or its top_k most
        likely ones; all draw among those of all ranks. The noise is the token's, whoever draws it.
        """
        begin, _ = share_of_rank(vocab_size, self.rank, self.num_ranks)
        words = vocabulary.all_words(logits, begin)
        best = self.group.all_gather(words.amax(1)).amax(0)
        candidates = vocabulary.candidates(words, vocabulary.logit_of(best), by, vocab_size, num_rows)
        every = self.group.all_gather(candidates).transpose(0, 1).flatten(1).contiguous()
        chosen = ops.sample_among(every, vocabulary.logit_of(best), *by[:-1], vocab_size, num_rows)
        return vocabulary.token_of(chosen)

    def draft_topk(self, logits: Tensor, vocab_size: int, num_candidates: int) -> tuple[Tensor, Tensor]:
        """The best candidates of all ranks' logits [B, L, V'], or of logits [B, L, V] that every rank has."""
        if logits.shape[-1] == vocab_size:
            return ops.draft_topk(logits, num_candidates)
        words = ops.draft_topk_share(logits, num_candidates, vocab_size, self.segments)
        return ops.draft_topk_merge(self.group.all_gather(words), num_candidates)

    def all_logits(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Every rank's part of the logits, side by side: f32 [T, V'] -> f32 [T, V]. For tests and tables; no step."""
        shares = [share_of_rank(vocab_size, rank, self.num_ranks) for rank in range(self.num_ranks)]
        longest = max(end - begin for begin, end in shares)
        parts = self.group.all_gather(pad(logits, (0, longest - logits.shape[1])))
        return torch.cat([part[:, : end - begin] for part, (begin, end) in zip(parts, shares, strict=True)], 1)
