"""Batch: up to S streams decoded together, and the five verbs of a step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from kdtree_nb.drafters import AnyDrafter, DraftCandidates, DraftContext
from kdtree_nb.native import ops
from kdtree_nb.speculate.drafting import (
    chain_trees,
    check_draft,
    check_tokens,
    root_trees,
    tree_from_candidates,
    tree_from_drafter,
)
from kdtree_nb.speculate.features import remember_accepted
from kdtree_nb.speculate.forward import TreeForward
from kdtree_nb.speculate.mode import TREE, Mode
from kdtree_nb.speculate.stats import STAGES, StepRecord, timed
from kdtree_nb.speculate.stream import Stream
from kdtree_nb.tree import DraftTree

PREFILL_CHUNK_TOKENS = 256
"""Prompt tokens in one prefill forward, per stream, or together while others wait. The logits do not depend on it."""


class Verified(NamedTuple):
    """The target's view of trees: logits f32 [T, V] of their rows, target_token i64 [S, N], num_nodes per stream,
    hidden states float [T, D] that the drafter wants."""

    logits: torch.Tensor
    target_token: torch.Tensor
    num_nodes: list[int]
    hidden: tuple[torch.Tensor, ...]


class Accepted(NamedTuple):
    """path i32 [S, L], num_accepted i32 [S], next_token i64 [S]; the same on the host for the streams that took part.

    streams, paths, emitted: per stream that took part, itself, its accepted node indices and its new tokens
    """

    path: torch.Tensor
    num_accepted: torch.Tensor
    next_token: torch.Tensor
    streams: list[Stream]
    paths: list[list[int]]
    emitted: list[list[int]]


class Batch:
    """Per-step state of S seats: i32 tensors prefix_len, budget, active [S] and i64 bonus [S] on `device`.

    A stream joins in a free seat, is prefilled, then takes part in steps until it has finished. Without a part in a
    step, a seat has active 0, budget 0 and no rows. What a stream emits does not depend on the others.

    max_budget: most tree nodes of a stream besides the root
    is_open:    streams join while others run: those get a step between two chunks of prefill, which are shorter
    """

    def __init__(
        self, forward: TreeForward, drafter: AnyDrafter | None, max_budget: int,
        on_step: Callable[[StepRecord], None] | None = None, mode: Mode = TREE, is_open: bool = False,
    ) -> None:  # fmt: skip
        self.model, self.device = forward.model, forward.tree_device
        self.on_step, self.mode, self.is_open = on_step, mode, is_open
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self.num_steps = 0
        self.max_budget = max_budget
        self.drafter = forward.features.attach(drafter if max_budget else None)
        self.forward, self.cache, self.prefix_len = forward, forward.cache, forward.prefix_len.zero_()
        self.streams = [Stream.nobody(seat) for seat in range(self.cache.num_streams)]
        self.roots = root_trees(torch.zeros(len(self.streams), dtype=torch.int64, device=self.device))
        self._select()

    @property
    def free_seats(self) -> list[int]:
        """Where nobody is."""
        return [seat for seat, stream in enumerate(self.streams) if stream.index < 0]

    def join(self, streams: Sequence[Stream]) -> None:
        """Give each of `streams` a free seat, of which there must be enough. They begin with an empty cache."""
        for stream, seat in zip(streams, self.free_seats, strict=False):
            stream.seat, stream.budget = seat, min(stream.budget, self.max_budget)
            self.streams[seat] = stream
        self.forward.choose.set([s.sampling for s in self.streams])
        self._load(streams)
        self._enter()

    def _load(self, streams: Sequence[Stream]) -> None:
        """Bring the state of the seats of `streams` to a text's beginning."""
        self.prefix_len[[s.seat for s in streams]] = 0

    def _enter(self) -> None:
        """Have those that are filled by now take part in steps."""
        self.bonus = torch.tensor([s.tokens[-1] for s in self.streams], device=self.device)
        self._select()

    def leave(self, streams: Sequence[Stream]) -> None:
        """Free the seats of `streams`, whether they have finished or not."""
        for stream in streams:
            self.streams[stream.seat] = Stream.nobody(stream.seat)
        self.forward.choose.set([s.sampling for s in self.streams])
        self._select()

    def _select(self) -> None:
        """Who is still to be prefilled, and who takes part in the next step."""
        unfinished = [s for s in self.streams if s.finish_reason is None]
        self.filling = [s for s in unfinished if s.num_unfilled > 0]
        self.running = [s for s in unfinished if s.num_unfilled == 0]
        seats = {s.seat for s in self.running}
        self.all_running = len(seats) == len(self.streams)
        budgets = [s.budget if s.seat in seats else 0 for s in self.streams]
        self.budget = torch.tensor(budgets, dtype=torch.int32, device=self.device)
        active = [int(s.seat in seats) for s in self.streams]
        self.active = torch.tensor(active, dtype=torch.int32, device=self.device)

    def advance(self) -> None:
        """A chunk of prefill where one is due, then a step of those that run; in a batch that is not open, either."""
        if self.filling:
            self.prefill()
        if self.running and (self.is_open or not self.filling):
            self.step()

    @timed("prefill")
    def prefill(self) -> None:
        """Put a chunk of tokens[:-1] of those who fill into the cache: a prompt is a tree without branches."""
        share = PREFILL_CHUNK_TOKENS // (len(self.filling) if self.is_open and self.running else 1)
        chunks: list[list[int]] = [[] for _ in self.streams]
        for stream in self.filling:
            prompt = stream.tokens[:-1]
            start = len(prompt) - stream.num_unfilled
            chunks[stream.seat] = prompt[start : start + max(1, share)]
        self.forward.prefill(chain_trees(chunks, self.device))
        for stream in self.filling:
            stream.num_unfilled -= len(chunks[stream.seat])
            stream.stats.num_prefill_forwards += 1
        self._enter()

    def step(self) -> None:
        """One target forward over all running streams; each emits at least one token."""
        draft = self.draft()
        tree = self.build(draft)
        verified = self.verify(tree)
        accepted = self.accept(tree, verified)
        self.remember(verified, accepted)
        self.compact(accepted)
        self._report(tree, verified, accepted)

    @timed("draft")
    def draft(self) -> DraftCandidates | DraftTree | None:
        """What the drafter proposes for the running streams; None where no stream has room for a drafted token."""
        if all(s.budget == 0 or s.num_remaining == 1 for s in self.running):
            return None
        vocab_size = self.model.config.vocab_size
        context = DraftContext(
            tokens=[s.tokens for s in self.running],
            stream_ids=[s.seat for s in self.running],
            num_prompt_tokens=[s.num_prompt_tokens for s in self.running],
            num_candidates=self.mode.num_candidates(self.max_budget, vocab_size),
            vocab_size=vocab_size,
            device=self.device,
        )
        ends = [(len(s.tokens), s.tokens[-1]) for s in self.running]
        draft = self.drafter.draft(context)
        check_draft(self, draft, ends)
        return draft

    @timed("build")
    def build(self, draft: DraftCandidates | DraftTree | None) -> DraftTree:
        """The trees of all S streams; no node lies deeper than its stream may still emit."""
        if isinstance(draft, DraftTree):
            tree = tree_from_drafter(self, draft)
        elif draft is None or draft.log_probs.shape[1] == 0:
            r = self.roots
            return DraftTree(self.bonus.unsqueeze(1), r.parent, r.depth, r.log_prob, r.ancestor_bits, self.active)
        else:
            tree = tree_from_candidates(self, draft)
        if not self.all_running:
            tree.num_nodes.mul_(self.active)
        return self._cut(tree)

    def _cut(self, tree: DraftTree) -> DraftTree:
        """Leave out the nodes that cost more time than they save, where the budget is "auto"."""
        cutter = self.mode.cutter
        if cutter is None:
            return tree
        if tree.num_nodes.is_cuda:
            tree.num_nodes.copy_(cutter.on_device(tree, self.active, self.prefix_len))
            return tree
        lengths = [len(s.tokens) - 1 for s in self.running]
        counts = cutter.on_host(tree, len(lengths), sum(lengths) / len(lengths))
        tree.num_nodes.numpy()[:] = counts
        if len(counts) > 1:
            return tree
        fields = (tree.token, tree.parent, tree.depth, tree.log_prob, tree.ancestor_bits)
        return DraftTree(*(field[:, : counts[0]] for field in fields), tree.num_nodes)

    @timed("verify")
    def verify(self, tree: DraftTree) -> Verified:
        """One target forward over the rows of the trees, and its choice after every node."""
        num_nodes = tree.num_nodes.tolist()
        try:
            logits, token, hidden = self.forward(tree, sum(num_nodes))
        except ValueError as error:
            check_tokens(self, tree, error)
            raise
        if token.shape[0] == tree.token.numel():
            return Verified(logits, token.view(tree.token.shape), num_nodes, hidden)
        used = torch.arange(tree.token.shape[1], device=token.device) < tree.num_nodes.unsqueeze(1)
        target_token = torch.full_like(tree.token, -1).masked_scatter_(used, token)
        return Verified(logits, target_token, num_nodes, hidden)

    @timed("accept")
    def accept(self, tree: DraftTree, verified: Verified) -> Accepted:
        """Follow the target's choices down the trees and emit them."""
        path, num_accepted, next_token = ops.tree_accept(tree, verified.target_token, tree.max_budget)
        nodes, lengths, target_token = path.tolist(), num_accepted.tolist(), verified.target_token.tolist()
        streams = self.running
        if any(-1 in target_token[s.seat][: verified.num_nodes[s.seat]] for s in streams):
            check_tokens(self, tree)  # on a GPU such a token gives NaN logits
        paths = [nodes[s.seat][: lengths[s.seat]] for s in streams]
        emitted, first_row = [], 0
        for stream, accepted in zip(streams, paths, strict=True):
            chosen = target_token[stream.seat]
            emitted.append(stream.emit([chosen[0], *[chosen[node] for node in accepted]]))
            num_nodes = verified.num_nodes[stream.seat]
            stream.record_step(num_nodes, len(accepted), len(emitted[-1]))
            if stream.keeps_logits:
                rows = [first_row + node for node in (0, *accepted)]
                stream.logits.append(self.all_logits(verified.logits[rows[: len(emitted[-1])]]))
            first_row += num_nodes
        if any(stream.finish_reason for stream in streams):
            self._select()
        return Accepted(path, num_accepted, next_token, streams, paths, emitted)

    @timed("draft")
    def remember(self, verified: Verified, accepted: Accepted) -> None:
        """Give the hidden states of the committed tokens to a drafter that wants them."""
        if self.forward.features.reader:
            longest = max(map(len, accepted.paths))
            begin = itertools.accumulate(verified.num_nodes[:-1], initial=0)
            first_row = torch.tensor(list(begin), dtype=torch.int32, device=self.device)
            took_part = torch.tensor(verified.num_nodes, dtype=torch.int32, device=self.device)
            remember_accepted(
                self.forward.features.reader, verified.hidden, first_row, self.prefix_len,
                accepted.path[:, :longest].contiguous(), accepted.num_accepted, took_part,
            )  # fmt: skip

    @timed("compact")
    def compact(self, accepted: Accepted) -> None:
        """Move the accepted rows of the cache behind the prefix and lengthen it; what comes next is the new root."""
        if any(path and path != list(range(1, len(path) + 1)) for path in accepted.paths):
            self.cache.compact(self.prefix_len, accepted.path, accepted.num_accepted)
        self.prefix_len.add_(accepted.num_accepted).add_(self.active)
        self.bonus = accepted.next_token if self.all_running else accepted.next_token.clamp_(min=0)

    def all_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits f32 [n, V] of the whole vocabulary, of which each of several ranks has a part."""
        return self.model.ranks.all_logits(logits, self.model.config.vocab_size)

    def close(self) -> None:
        """Let go of what the batch holds; nothing here. Also called after an error."""

    def _report(self, tree: DraftTree, verified: Verified, accepted: Accepted) -> None:
        if self.on_step:
            streams = [stream.seat for stream in accepted.streams]
            target_token = verified.target_token.clone()  # the next step may overwrite it
            self.on_step(StepRecord(self.num_steps, streams, tree, target_token, accepted.paths, accepted.emitted))
        self.num_steps += 1
