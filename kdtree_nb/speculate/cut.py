"""Cut best-first trees to the number of nodes that gives the most tokens per second.

A node of log-prob l is accepted with probability exp(l), so a step of trees T emits sum over their nodes of exp(l)
tokens, roots (the tokens that the target gives for free) included. Best-first trees are nested: leaving out the last
nodes gives the best smaller tree, and never changes what is emitted, only in how many steps.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch

from kdtree_nb.speculate.cost import CostModel, blend, prefix_weight
from kdtree_nb.tree import DraftTree

GRID = 64
"""Lengths of prefix for which a cutter looks costs up."""


def cut(tree: DraftTree, seconds: torch.Tensor) -> torch.Tensor:
    """num_nodes, integers [S], that maximise tokens per second of the whole step.

    seconds: f64 [S * N + 1], of a step by its rows, NEVER_S where an active stream would be without a root. A stream
    whose num_nodes is 0 takes no part. The heaviest nodes of all streams come first; equal rates: the fewest rows.
    Works on the device of `tree` without looking at a value.
    """
    S, N = tree.log_prob.shape
    used = torch.arange(N, device=tree.log_prob.device) < tree.num_nodes.unsqueeze(1)
    score = torch.where(used, tree.log_prob, -torch.inf)
    if S == 1:
        num_rows = (score[0].exp_().cumsum(0) / seconds[1:]).argmax(dim=0, keepdim=True)
        return torch.minimum(tree.num_nodes, num_rows + 1)
    score[:, 0] += 1  # a root comes before any node
    heaviest, order = score.flatten().sort(descending=True, stable=True)
    num_rows = (heaviest.clamp_(max=0).exp().cumsum(0) / seconds[1:]).argmax(dim=0, keepdim=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(S * N, device=order.device))
    return torch.minimum(tree.num_nodes, (place <= num_rows).view(S, N).sum(1))


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


class Cutter:
    """Cuts the trees of steps of S streams, by a cost model looked up at GRID lengths of prefix.

    max_budget: nodes of a stream's tree that are built, to be cut
    overhead_s: [S] seconds of a step besides the forward, by the number of active streams less one; each one number
                or f64 [P]
    host_sizes: slots per stream of the steps that are chosen among, ascending; [0] where the host leads them itself
    """

    def __init__(
        self, cost: CostModel, num_streams: int, max_budget: int, overhead_s: Sequence[float | np.ndarray],
        device: torch.device, host_sizes: Sequence[int] = (0,),
    ) -> None:  # fmt: skip
        self.max_budget, self.host_sizes = max_budget, tuple(host_sizes)
        self._cost, self._num_streams, self._overhead_s, self._device = cost, num_streams, overhead_s, device
        self._unit = -(-2 * cost.prefix_len[-1] // GRID)  # tokens; the grid reaches twice as far as was measured

    @functools.cached_property
    def _of_host(self) -> np.ndarray:
        """Seconds f64 [sizes, 1 + S, GRID, rows + 1]."""
        return np.array([self._seconds(size) for size in self.host_sizes])

    @functools.cached_property
    def _of_device(self) -> torch.Tensor:
        """Seconds f64 [1 + S, GRID, rows + 1], of the largest size."""
        return torch.from_numpy(self._of_host[-1]).to(self._device)

    def _seconds(self, num_slots: int) -> np.ndarray:
        """f64 [1 + S, GRID, rows + 1] by the number of active streams; with none, nothing of it is read."""
        counts, largest = range(1, self._num_streams + 1), self._num_streams * (self.max_budget + 1)
        weights = [prefix_weight(self._cost.prefix_len, self.grid_prefix(place * self._unit)) for place in range(GRID)]
        by_count = []
        for count in counts:
            table = self._cost.table(count, largest, num_slots, self._overhead_s[count - 1])
            last = len(table) - 1
            by_count.append([blend(table[first], table[min(first + 1, last)], w) for first, w in weights])
        return np.array([np.ones_like(by_count[0]), *by_count])

    def place(self, prefix_len: float) -> int:
        """The cell of the grid that a prefix length lies in."""
        return min(int(prefix_len) // self._unit, GRID - 1)

    def grid_prefix(self, prefix_len: float) -> float:
        """The prefix length that stands for this one: the middle of its cell of the grid."""
        return (self.place(prefix_len) + 0.5) * self._unit

    def seconds(self, num_active: int, prefix_len: float) -> np.ndarray:
        """Seconds f64 [sizes, rows + 1] of steps; prefix_len is the streams' mean."""
        return self._of_host[:, num_active, self.place(prefix_len)]

    def on_host(self, tree: DraftTree, num_active: int, prefix_len: float) -> list[int]:
        """Nodes of each stream's tree, which lies on the host; prefix_len is the streams' mean."""
        seconds = self.seconds(num_active, prefix_len)
        log_prob, num_nodes = tree.log_prob.numpy(), tree.num_nodes.tolist()
        if len(self.host_sizes) == 1:
            return cut_on_host(log_prob, num_nodes, seconds[0])[0]
        best = [
            cut_on_host(log_prob, [min(count, size) for count in num_nodes], row)
            for size, row in zip(self.host_sizes, seconds, strict=True)
        ]
        return max(best, key=lambda found: found[1])[0]

    def on_device(self, tree: DraftTree, active: torch.Tensor, prefix_len: torch.Tensor) -> torch.Tensor:
        """Integers [S], from active and prefix_len i32 [S] on the device, without a value known to the host."""
        if self._num_streams == 1:
            table, mean = self._of_device[1], prefix_len
        else:
            num_active = active.sum(dim=0, keepdim=True)
            table = self._of_device.index_select(0, num_active)[0]
            total = (prefix_len * active).sum(dim=0, keepdim=True)
            mean = total.div(num_active.clamp(min=1), rounding_mode="floor")
        place = mean.div(self._unit, rounding_mode="floor").clamp_(max=GRID - 1)
        num_rows = tree.log_prob.numel()  # a drafter's own tree can be narrower than the budget allows
        return cut(tree, table.index_select(0, place)[0, : num_rows + 1])
