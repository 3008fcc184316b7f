"""Probes: steps of a model whose seconds are measured, of trees that are given and of trees that a drafter drafts."""

from __future__ import annotations

import time

import numpy as np
import torch

from kdtree_nb.drafters import AnyDrafter
from kdtree_nb.model import Model
from kdtree_nb.native import ops
from kdtree_nb.speculate.device_forward import DeviceForward
from kdtree_nb.speculate.drafting import chain_trees
from kdtree_nb.speculate.forward import TreeForward
from kdtree_nb.speculate.mode import Mode
from kdtree_nb.speculate.step_runner import RING_SIZE
from kdtree_nb.tree import DraftTree

STEPS_IN_FLIGHT = 4
"""Captured steps of a GPU that are timed together, as an engine launches them ahead."""

TEXT_STEPS = 6
"""Steps that go on from a place of the text, to see trees behind what the target itself wrote."""

PREFILL_TOKENS = 256

assert max(STEPS_IN_FLIGHT, TEXT_STEPS) <= RING_SIZE


class HostProbe:
    """Times forwards that the host leads, on a cache that holds the text for every stream."""

    def __init__(self, model: Model, num_streams: int, text: list[int], prefix_len: int, max_budget: int) -> None:
        self.forward = TreeForward.allocate(model, num_streams, prefix_len + max_budget + 1)
        self.trees = Trees(text, num_streams, max_budget, model.config.vocab_size, model.device)
        fill(self.forward, text[:prefix_len])

    def __call__(self, prefix_len: int, num_nodes: int) -> float:
        self.forward.prefix_len.fill_(prefix_len)
        tree = self.trees(prefix_len, num_nodes)
        wait_for(self.forward.model.device)
        start = time.perf_counter()
        self.forward(tree, num_nodes * tree.num_streams)
        wait_for(self.forward.model.device)
        return time.perf_counter() - start


class DeviceProbe:
    """Times steps that the device takes, with trees of the host, from launch to record."""

    def __init__(self, model: Model, num_streams: int, text: list[int], prefix_len: int, max_budget: int) -> None:
        room = STEPS_IN_FLIGHT * (max_budget + 1)
        self.forward = DeviceForward.allocate(model, num_streams, prefix_len + room + max_budget + 1)
        host = torch.device("cpu")
        self.trees = Trees(text, num_streams, max_budget, model.config.vocab_size, host)
        self.num_steps = STEPS_IN_FLIGHT if model.device.type == "cuda" else 1
        fill(self.forward, text[:prefix_len])

    def capture(self, num_slots: int) -> None:
        """Time steps of this many slots per stream from now on."""
        self.runner = self.forward.root_runner() if num_slots == 1 else self.forward.tree_runner(num_slots)

    def __call__(self, prefix_len: int, num_nodes: int) -> float:
        state = self.forward.state
        state.prefix_len.fill_(prefix_len)
        state.active.fill_(1)
        state.remaining.fill_(state.text.shape[1])
        tree = self.trees(prefix_len, num_nodes)
        state.bonus.copy_(tree.token[:, 0])
        if self.runner.buffer is not None:
            self.runner.buffer.put(tree)
        wait_for(self.forward.device)
        start = time.perf_counter()
        places = [self.runner.launch() for _ in range(self.num_steps)]
        self.runner.wait(places[-1])
        return (time.perf_counter() - start) / self.num_steps


class DraftingProbe:
    """Times steps in which a drafter drafts on the device, from launch to record.

    drafter: what was attached, where it looks at hidden states; only a DeviceDrafter can be timed
    """

    def __init__(
        self, model: Model, drafter: AnyDrafter, num_streams: int, text: list[int], prefix_len: int, max_budget: int
    ) -> None:  # fmt: skip
        self.num_steps = STEPS_IN_FLIGHT if model.device.type == "cuda" else 1
        self._most = (TEXT_STEPS + 1) * (1 + drafter.depth)
        room = self._most + max_budget + 1
        self.forward = DeviceForward.allocate(model, num_streams, prefix_len + room)
        self.drafter = self.forward.features.attach(drafter)
        self.text, self._longest = text, model.config.max_position_embeddings
        self.forward.state.text[:, : len(text)] = torch.tensor(text, device=model.device)
        self.forward.budget.fill_(max_budget)
        fill(self.forward, text[:prefix_len])

    def capture(self, num_slots: int, mode: Mode) -> None:
        """Time steps of this many slots per stream from now on; of one slot they draft nothing."""
        forward = self.forward
        self.runner = (
            forward.root_runner() if num_slots == 1 else forward.drafting_runner(self.drafter, num_slots - 1, mode)
        )

    def __call__(self, prefix_len: int) -> tuple[float, float]:
        """(seconds, rows of all streams) of a step behind so many tokens of the text."""
        self._begin(prefix_len)
        wait_for(self.forward.device)
        start = time.perf_counter()
        places = [self.runner.launch() for _ in range(self.num_steps)]
        self.runner.wait(places[-1])
        seconds = time.perf_counter() - start
        rows = [self.runner.wait(place)[0].sum() for place in places]
        return seconds / self.num_steps, float(np.mean(rows))

    def probabilities(self, prefix_len: int) -> np.ndarray:
        """f64 [TEXT_STEPS, N], by node of the trees of steps that go on from so many tokens of the text; 0 where a tree
        has no such node."""
        self._begin(prefix_len)
        places = [self.runner.launch(with_scores=True) for _ in range(TEXT_STEPS)]
        self.runner.wait(places[-1])
        return np.exp([self.runner.scores(place)[0] for place in places])

    def _begin(self, prefix_len: int) -> None:
        state = self.forward.state
        state.prefix_len.fill_(prefix_len)
        state.active.fill_(1)
        state.remaining.fill_(min(self._most, self._longest - prefix_len - 1))
        state.bonus.fill_(self.text[prefix_len])


class Trees:
    """Trees of S streams of any size, on `device`: tokens drawn from the text, as bushy as a drafter's."""

    def __init__(
        self, text: list[int], num_streams: int, max_budget: int, vocab_size: int, device: torch.device
    ) -> None:
        self.text, self.device = text, device
        depth = min(16, max_budget)
        generator = torch.Generator().manual_seed(0)
        log_probs = torch.randn(num_streams, depth, min(64, vocab_size), generator=generator).mul_(2).log_softmax(2)
        place = torch.randint(len(text), log_probs.shape, generator=generator)
        token = torch.tensor(text)[place]
        bonus = torch.zeros(num_streams, dtype=torch.int64)
        ids = torch.arange(log_probs.shape[2]).expand(log_probs.shape).contiguous()
        tree = ops.tree_build(log_probs.sort(descending=True).values.contiguous(), ids, bonus, max_budget)
        drawn = token.flatten(1)[:, torch.arange(max_budget + 1) % token[0].numel()]
        self.tree = DraftTree(*(field.to(device) for field in [drawn, *list(vars(tree).values())[1:]]))

    def __call__(self, prefix_len: int, num_nodes: int) -> DraftTree:
        """The first num_nodes nodes of each tree, whose root is the text's token behind the prefix."""
        self.tree.token[:, 0] = self.text[prefix_len]
        self.tree.num_nodes.fill_(num_nodes)
        return self.tree


def fill(forward: TreeForward | DeviceForward, text: list[int]) -> None:
    """Put the text into the cache of every stream."""
    S, device = forward.cache.num_streams, forward.tree_device
    if isinstance(forward, DeviceForward):
        forward.state.active.fill_(1)
    for start in range(0, len(text), PREFILL_TOKENS):
        forward.prefill(chain_trees([text[start : start + PREFILL_TOKENS]] * S, device))


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
