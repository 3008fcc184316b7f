"""Cut best-first trees to the number of nodes that gives the most tokens per second.

A node of log-prob l is accepted with probability exp(l), so a step of trees T emits sum over their nodes of exp(l)
tokens, roots (the tokens that the target gives for free) included. Best-first trees are nested: leaving out the last
nodes gives the best smaller tree, and never changes what is emitted, only in how many steps.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from kdtree_nb.speculate.cost import CostModel, prefix_weight
from kdtree_nb.tree import DraftTree


def cut(tree: DraftTree, seconds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(num_nodes i32 [S] that maximise tokens per second of the whole step, tokens per second f64 [1]).

    seconds: f64 [S * N + 1], of a step by its rows, NEVER_S where an active stream would be without a root. A stream
    whose num_nodes is 0 takes no part. The heaviest nodes of all streams come first; equal rates: the fewest rows.
    Works on the device of `tree` without looking at a value.
    """
    S, N = tree.log_prob.shape
    used = torch.arange(N, device=tree.log_prob.device) < tree.num_nodes.unsqueeze(1)
    score = tree.log_prob.masked_fill(~used, -torch.inf)
    if S == 1:
        rate = score[0].exp().cumsum(0) / seconds[1:]
        num_rows = rate.argmax(dim=0, keepdim=True)
        return torch.minimum(tree.num_nodes, num_rows + 1).int(), rate[num_rows]
    score[:, 0] += 1  # a root comes before any node
    heaviest, order = score.flatten().sort(descending=True, stable=True)
    rate = heaviest.clamp_(max=0).exp().cumsum(0) / seconds[1:]
    num_rows = rate.argmax(dim=0, keepdim=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(S * N, device=order.device))
    taken = (place <= num_rows).view(S, N).sum(1)
    return torch.minimum(tree.num_nodes, taken).int(), rate[num_rows]


class Tables(NamedTuple):
    """seconds: f64 [sizes, 1 + S, P, rows + 1], by slots, active streams, prefix length and rows; knots: f64 [P]."""

    seconds: torch.Tensor
    knots: torch.Tensor


class Cutter:
    """Cuts the trees of steps of S streams, by a cost model.

    max_budget: nodes of a stream's tree that are built, to be cut
    overhead_s: [S] seconds of a step besides the forward, by the number of active streams less one
    host_sizes: slots per stream of the steps that the host chooses among; [0] where it leads them itself
    """

    def __init__(
        self, cost: CostModel, num_streams: int, max_budget: int, overhead_s: Sequence[float], device: torch.device,
        host_sizes: Sequence[int] = (0,),
    ) -> None:  # fmt: skip
        self.max_budget, self.host_sizes = max_budget, tuple(host_sizes)
        self._cost, self._num_streams, self._overhead_s, self._device = cost, num_streams, overhead_s, device

    @functools.cached_property
    def _of_host(self) -> Tables:
        is_captured = self.host_sizes != (0,)
        return self._tables(self.host_sizes, torch.device("cpu") if is_captured else self._device)

    @functools.cached_property
    def _of_device(self) -> Tables:
        return self._tables([self.max_budget + 1], self._device)

    def _tables(self, sizes: Sequence[int], device: torch.device) -> Tables:
        """Seconds of every number of rows; those without an active stream are not read."""
        counts, largest = range(1, self._num_streams + 1), self._num_streams * (self.max_budget + 1)
        measured = [[self._cost.table(n, largest, size, self._overhead_s[n - 1]) for n in counts] for size in sizes]
        seconds = torch.from_numpy(np.array([[np.ones_like(by_count[0]), *by_count] for by_count in measured]))
        return Tables(seconds.to(device), torch.tensor(self._cost.prefix_len, dtype=torch.float64, device=device))

    def on_host(self, tree: DraftTree, num_active: int, prefix_len: float) -> torch.Tensor:
        """num_nodes i32 [S] for streams whose prefixes have a mean length of prefix_len, both known to the host."""
        first, weight = prefix_weight(self._cost.prefix_len, prefix_len)
        seconds = self._of_host.seconds[:, num_active, first]
        if weight:
            seconds = seconds.lerp(self._of_host.seconds[:, num_active, first + 1], weight)
        seconds = seconds[:, : tree.log_prob.numel() + 1]
        if len(self.host_sizes) == 1:
            return cut(tree, seconds[0])[0]
        best = [_cut_to(tree, size, row) for size, row in zip(self.host_sizes, seconds, strict=True)]
        return max(best, key=lambda found: found[1].item())[0]

    def on_device(self, tree: DraftTree, active: torch.Tensor, prefix_len: torch.Tensor) -> torch.Tensor:
        """num_nodes i32 [S] from active and prefix_len i32 [S] on the device, without a value known to the host."""
        (all_seconds, knots), num_active = self._of_device, active.sum(dim=0, keepdim=True)
        seconds = all_seconds[0].index_select(0, num_active)[0]
        if len(knots) == 1:
            return cut(tree, seconds[0])[0]
        mean = (prefix_len * active).sum(dim=0, keepdim=True) / num_active.clamp(min=1)
        first = (mean >= knots[1:-1]).sum(dim=0, keepdim=True)
        low, high = knots.index_select(0, first), knots.index_select(0, first + 1)
        weight = ((mean - low) / (high - low)).clamp(min=0)
        seconds = seconds.index_select(0, first)[0].lerp(seconds.index_select(0, first + 1)[0], weight)
        return cut(tree, seconds)[0]


def _cut_to(tree: DraftTree, num_slots: int, seconds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The best cut that fits into a captured step of num_slots slots."""
    fields = list(vars(tree).values())[:-1]
    return cut(DraftTree(*fields, tree.num_nodes.clamp(max=num_slots)), seconds)
