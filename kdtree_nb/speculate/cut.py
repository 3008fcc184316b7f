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


def cut(tree: DraftTree, seconds: torch.Tensor) -> torch.Tensor:
    """num_nodes i32 [S] that maximise tokens per second of the whole step.

    seconds: f64 [S * N + 1], of a step by its rows, NEVER_S where an active stream would be without a root. A stream
    whose num_nodes is 0 takes no part. The heaviest nodes of all streams come first; equal rates: the fewest rows.
    Works on the device of `tree` without looking at a value.
    """
    S, N = tree.log_prob.shape
    used = torch.arange(N, device=tree.log_prob.device) < tree.num_nodes.unsqueeze(1)
    score = tree.log_prob.masked_fill(~used, -torch.inf)
    if S == 1:
        num_rows = (score[0].exp().cumsum(0) / seconds[1:]).argmax(dim=0, keepdim=True)
        return torch.minimum(tree.num_nodes, num_rows + 1).int()
    score[:, 0] += 1  # a root comes before any node
    heaviest, order = score.flatten().sort(descending=True, stable=True)
    num_rows = (heaviest.clamp_(max=0).exp().cumsum(0) / seconds[1:]).argmax(dim=0, keepdim=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(S * N, device=order.device))
    return torch.minimum(tree.num_nodes, (place <= num_rows).view(S, N).sum(1)).int()


def cut_on_host(log_prob: np.ndarray, num_nodes: list[int], seconds: np.ndarray) -> tuple[list[int], float]:
    """(what `cut` gives, tokens per second) for log_prob f64 [S, N] on the host, where numpy takes a few microseconds.

    Only seconds[: sum of num_nodes + 1] are looked at.
    """
    if len(num_nodes) == 1:
        rate = np.exp(log_prob[0, : num_nodes[0]]).cumsum() / seconds[1 : num_nodes[0] + 1]
        best = int(rate.argmax())
        return [best + 1], float(rate[best])
    stream = np.repeat(np.arange(len(num_nodes)), num_nodes)
    score = np.concatenate([row[:count] for row, count in zip(log_prob, num_nodes, strict=True)])
    starts = np.cumsum([0, *num_nodes])[:-1]
    is_root = np.zeros(len(score))
    is_root[starts[np.array(num_nodes) > 0]] = 1
    order = np.argsort(-(score + is_root), kind="stable")
    rate = np.exp(score[order]).cumsum() / seconds[1 : len(score) + 1]
    best = int(rate.argmax())
    return np.bincount(stream[order[: best + 1]], minlength=len(num_nodes)).tolist(), float(rate[best])


class Tables(NamedTuple):
    """seconds: f64 [1 + S, P, rows + 1], by active streams, prefix length and rows; knots: f64 [P], those lengths."""

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
    def _of_host(self) -> np.ndarray:
        """Seconds f64 [sizes, 1 + S, P, rows + 1]."""
        return np.array([self._seconds(size) for size in self.host_sizes])

    @functools.cached_property
    def _of_device(self) -> Tables:
        seconds = torch.from_numpy(self._seconds(self.max_budget + 1)).to(self._device)
        return Tables(seconds, torch.tensor(self._cost.prefix_len, dtype=torch.float64, device=self._device))

    def _seconds(self, num_slots: int) -> np.ndarray:
        """f64 [1 + S, P, rows + 1] by the number of active streams; with none, nothing of it is read."""
        counts, largest = range(1, self._num_streams + 1), self._num_streams * (self.max_budget + 1)
        by_count = [self._cost.table(n, largest, num_slots, self._overhead_s[n - 1]) for n in counts]
        return np.array([np.ones_like(by_count[0]), *by_count])

    def on_host(self, tree: DraftTree, num_active: int, prefix_len: float) -> list[int]:
        """Nodes of each stream's tree, which lies on the host; prefix_len is the streams' mean."""
        first, weight = prefix_weight(self._cost.prefix_len, prefix_len)
        seconds = self._of_host[:, num_active, first]
        if weight:
            seconds = (1 - weight) * seconds + weight * self._of_host[:, num_active, first + 1]
        log_prob, num_nodes = tree.log_prob.numpy(), tree.num_nodes.tolist()
        if len(self.host_sizes) == 1:
            return cut_on_host(log_prob, num_nodes, seconds[0])[0]
        best = [
            cut_on_host(log_prob, [min(count, size) for count in num_nodes], row)
            for size, row in zip(self.host_sizes, seconds, strict=True)
        ]
        return max(best, key=lambda found: found[1])[0]

    def on_device(self, tree: DraftTree, active: torch.Tensor, prefix_len: torch.Tensor) -> torch.Tensor:
        """num_nodes i32 [S] from active and prefix_len i32 [S] on the device, without a value known to the host."""
        (all_seconds, knots), num_active = self._of_device, active.sum(dim=0, keepdim=True)
        seconds = all_seconds.index_select(0, num_active)[0]
        if len(knots) == 1:
            return cut(tree, seconds[0])
        mean = (prefix_len * active).sum(dim=0, keepdim=True) / num_active.clamp(min=1)
        first = (mean >= knots[1:-1]).sum(dim=0, keepdim=True)
        low, high = knots.index_select(0, first), knots.index_select(0, first + 1)
        weight = ((mean - low) / (high - low)).clamp(min=0)
        seconds = seconds.index_select(0, first)[0].lerp(seconds.index_select(0, first + 1)[0], weight)
        return cut(tree, seconds)
