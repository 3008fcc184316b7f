"""DeviceForward: a cache, the state of its streams and the captured steps on them, kept from one text to the next."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import NamedTuple

import numpy as np
import torch

from kdtree_nb.drafters import DeviceDrafter
from kdtree_nb.model import LatentCache, Model
from kdtree_nb.native import ops
from kdtree_nb.native.devices import memory_for, put
from kdtree_nb.speculate.device_step import (
    MakeTree,
    TreeBuffer,
    drafted_trees,
    root_trees,
    take_step,
)
from kdtree_nb.speculate.features import Features
from kdtree_nb.speculate.forward import SLOT_UNIT, addresses
from kdtree_nb.speculate.mode import TREE, Mode, num_tree_slots
from kdtree_nb.speculate.sampling import Chooser
from kdtree_nb.speculate.step_runner import StepRunner
from kdtree_nb.speculate.stream import Stream
from kdtree_nb.tree import DraftTree

MAX_RUNNERS = 16
"""Kinds of steps that are kept at a time. Each holds the memory of its logits."""


def _memory_for(what: str, device: torch.device) -> AbstractContextManager[None]:
    return memory_for(f"generate: expected memory for {what}", device, "Use fewer streams or a smaller budget.")


class Plan(NamedTuple):
    """A kind of step: where its trees come from, how deep and large they get, what the host fills, if anything, and
    whether the device drafts."""

    make_tree: MakeTree
    max_depth: int
    num_slots: int
    buffer: TreeBuffer | None = None
    drafts: bool = False


class DeviceForward:
    """Steps over S streams that run from tree to new state without the host.

    state:  where the streams stand; budget i32 [S] and is_stop bool [V] go with it
    choose: the token after each row, greedy or drawn
    """

    def __init__(self, model: Model, cache: LatentCache) -> None:
        self.model, self.cache, self.device = model, cache, model.device
        self.tree_device = torch.device("cpu")  # where building a small tree takes a few microseconds
        S, P, V = cache.num_streams, cache.num_slots, model.config.vocab_size
        counts = [torch.zeros(S, dtype=torch.int32, device=self.device) for _ in range(4)]
        prefix_len, remaining, active, self.budget = counts
        bonus = torch.zeros(S, dtype=torch.int64, device=self.device)
        text = torch.zeros(S, P, dtype=torch.int64, device=self.device)
        self.state = ops.StreamState(prefix_len, bonus, remaining, active, text)
        self.is_stop = torch.zeros(V, dtype=torch.bool, device=self.device)
        self.choose = Chooser(S, model)
        self.features = Features(model, cache)
        self._addresses = addresses(model)
        self._storages = [t.untyped_storage() for t in model.tensors()]  # captured steps read them: they must stay
        self._runners: dict[Hashable, StepRunner] = {}
        self._budgets: dict[int, torch.Tensor] = {}  # `budget` again, cut off at a step's own

    @classmethod
    def allocate(cls, model: Model, num_streams: int, num_slots: int) -> DeviceForward:
        """One with a cache of its own of at least num_slots slots, rounded up so that later texts may use it."""
        num_slots = -(-num_slots // SLOT_UNIT) * SLOT_UNIT
        with _memory_for(f"the texts of {num_streams} streams of {num_slots} tokens", model.device):
            return cls(model, model.new_cache(num_streams, num_slots))

    def fits(self, model: Model, num_streams: int, num_slots: int) -> bool:
        """Whether the next batch can use it: it is large enough, and the model's weights are those captured."""
        cache = self.cache
        fits = cache.num_streams == num_streams and cache.num_slots >= num_slots
        return fits and self.model is model and self._addresses == addresses(model)

    @property
    def prefix_len(self) -> torch.Tensor:
        """i32 [S]: tokens whose rows the cache holds."""
        return self.state.prefix_len

    def begin(self) -> None:
        """Nobody in any seat."""
        self.state.active.zero_()
        self.stop_at(frozenset())

    def load(self, streams: Sequence[Stream]) -> None:
        """Begin new texts in the seats of `streams`: the prompts, how much each may emit, and nothing in the cache."""
        texts = np.zeros((len(streams), max(len(s.tokens) for s in streams)), dtype=np.int64)
        for row, stream in zip(texts, streams, strict=True):
            row[: len(stream.tokens)] = stream.tokens
        seats, state = self._upload([s.seat for s in streams], torch.int64), self.state
        state.text[:, : texts.shape[1]].index_copy_(0, seats, self._upload(texts, torch.int64))
        for to, values in (
            (state.prefix_len, [0] * len(streams)), (state.bonus, [s.tokens[-1] for s in streams]),
            (state.remaining, [s.num_remaining for s in streams]), (self.budget, [s.budget for s in streams]),
        ):  # fmt: skip
            to.index_copy_(0, seats, self._upload(values, to.dtype))
        self.limit_budgets()

    def limit_budgets(self) -> None:
        """Have the steps that draft see `budget`, each up to its own largest."""
        for max_budget, budget in self._budgets.items():
            torch.clamp(self.budget, max=max_budget, out=budget)

    def set_active(self, seats: Sequence[int], is_active: bool) -> None:
        """Who takes part in the steps that are launched from now on."""
        if seats:
            self.state.active.index_fill_(0, self._upload(seats, torch.int64), int(is_active))

    def stop_at(self, tokens: frozenset[int]) -> None:
        """Which tokens end the text of a stream without the host."""
        is_stop = np.zeros(len(self.is_stop), dtype=bool)
        is_stop[[token for token in tokens if 0 <= token < len(is_stop)]] = True
        put(self.is_stop, is_stop)

    def _upload(self, values: np.ndarray | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """`values` on the device, in the order of its stream and without waiting for it."""
        return put(torch.empty(np.shape(values), dtype=dtype, device=self.device), values)

    def prefill(self, tree: DraftTree) -> None:
        """Append the rows of trees without branches, which lie on the host, to the cache and to the prefix."""
        S, num_slots = tree.token.shape
        with _memory_for(f"the prefill of {S} streams by {num_slots} tokens at a time", self.device):
            buffer = TreeBuffer(S, num_slots, self.device)
            buffer.put(tree)
            rows, hidden = ops.tree_rows_padded(buffer.tree, self.prefix_len), dict.fromkeys(self.features.layers)
            self.model.forward(rows, buffer.tree, self.cache, self.prefix_len, need_logits=False, hidden=hidden)
            self.features.remember(hidden.values(), rows.stream, rows.position)
            self.prefix_len.add_(buffer.tree.num_nodes)

    def root_runner(self) -> StepRunner:
        """Steps of AR decoding: a root for each active stream."""

        def plan() -> Plan:
            tree = root_trees(self.state)
            return Plan(lambda: tree, max_depth=0, num_slots=1)

        return self._runner("root", plan)

    def tree_runner(self, num_nodes: int) -> StepRunner:
        """Steps over trees of at most `num_nodes` nodes that the host puts into the runner's `buffer`."""
        num_slots = num_tree_slots(num_nodes)

        def plan() -> Plan:
            buffer = TreeBuffer(self.cache.num_streams, num_slots, self.device)
            return Plan(lambda: buffer.tree, num_slots - 1, num_slots, buffer)

        return self._runner(num_slots, plan)

    def drafting_runner(self, drafter: DeviceDrafter, max_budget: int, mode: Mode = TREE) -> StepRunner:
        """Steps that draft their trees themselves, of at most max_budget nodes besides the root."""

        def plan() -> Plan:
            depth = torch.arange(1, drafter.depth + 1, dtype=torch.int32, device=self.device)[None, :, None]
            budget = self._budgets.setdefault(max_budget, self.budget.clamp(max=max_budget))
            sizes = budget, max_budget, depth, mode
            make_tree = functools.partial(drafted_trees, self.model, drafter, self.state, *sizes)
            return Plan(make_tree, min(max_budget, drafter.depth), max_budget + 1, drafts=True)

        return self._runner((id(drafter), max_budget, mode.is_chain, id(mode.cutter)), plan)

    def _runner(self, key: Hashable, plan: Callable[[], Plan]) -> StepRunner:
        """The kept runner, or a new one, captured while no stream is active: its first run changes nothing."""
        key = key, self.choose.kind, id(self.features.reader)
        if key not in self._runners:
            if len(self._runners) == MAX_RUNNERS:
                self._runners.clear()
                self._budgets.clear()
            active = self.state.active.clone()
            self.state.active.zero_()
            self._runners[key] = self._new_runner(plan())
            self.state.active.copy_(active)
        return self._runners[key]

    def _new_runner(self, plan: Plan) -> StepRunner:
        """A new runner; where memory is short, once more with what the allocator had kept for later."""
        S = self.cache.num_streams
        with _memory_for(f"a step of {S} streams of up to {plan.num_slots} rows", self.device):
            with suppress(torch.OutOfMemoryError):
                return self._capture(plan)
            torch.cuda.empty_cache()
            return self._capture(plan)

    def _capture(self, plan: Plan) -> StepRunner:
        step = functools.partial(
            take_step, self.model, self.cache, self.features.reader, self.state, self.is_stop, self.choose,
            plan.make_tree, plan.max_depth,
        )  # fmt: skip
        S = self.cache.num_streams
        return StepRunner(step, S, plan.max_depth, self.device, self._shared_pool(), plan.buffer, plan.drafts)

    def _shared_pool(self) -> tuple[int, int] | None:
        """The memory pool of the runners that are there; a pool is gone with the last graph that used it."""
        if self.device.type != "cuda":
            return None
        return next((r.pool for r in self._runners.values()), None) or torch.cuda.graph_pool_handle()
