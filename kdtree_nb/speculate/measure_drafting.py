"""Measure what a drafter adds to a step and what its trees are like: whole steps, less what the forward takes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import torch

from kdtree_nb.drafters import AnyDrafter, DeviceDrafter
from kdtree_nb.model import Model
from kdtree_nb.speculate.cost import CostModel, Overhead, Surface
from kdtree_nb.speculate.cost_store import drafter_key
from kdtree_nb.speculate.cut import Cutter
from kdtree_nb.speculate.engine import Engine
from kdtree_nb.speculate.mode import Mode, captured_sizes, num_tree_slots
from kdtree_nb.speculate.probes import DraftingProbe
from kdtree_nb.speculate.stats import STAGES

NUM_TOKENS = 32
"""Length of the texts that are generated to see what a drafter on the host takes."""

NUM_PLACES = 8
"""Places of the text from which steps go on whose trees are looked at."""

CUT_SLOTS = 17
"""Slots of the captured step that is timed with its trees cut and whole."""


def with_drafter(
    cost: CostModel, model: Model, drafter: AnyDrafter, is_chain: bool, text: list[int], num_streams: Sequence[int],
    num_rounds: int, use_graphs: bool | None,
) -> CostModel:  # fmt: skip
    """`cost` with a drafter's overhead for these numbers of streams and, where it drafts on the device, its trees."""
    name = drafter_key(drafter, is_chain)
    overhead: list[Overhead] = []
    if cost.key.kind == "device":
        with torch.inference_mode():
            for count in num_streams:
                probe = DraftingProbe(model, drafter, count, text, cost.prefix_len[-1], cost.max_budget)
                if not isinstance(probe.drafter, DeviceDrafter):
                    break
                measured = _Drafting(cost, probe, is_chain, num_rounds)
                if not overhead:
                    cost = dataclasses.replace(cost, typical={**cost.typical, name: measured.typical()})
                overhead += measured.overheads()
    overhead = overhead or _on_host(cost, model, drafter, is_chain, text, num_streams, num_rounds, use_graphs)
    return dataclasses.replace(cost, overhead={**cost.overhead, name: tuple(overhead)})


class _Drafting:
    """Captured steps of all sizes in which a drafter drafts on the device."""

    def __init__(self, cost: CostModel, probe: DraftingProbe, is_chain: bool, num_rounds: int) -> None:
        self.cost, self.probe, self.mode, self.num_rounds = cost, probe, Mode(is_chain), num_rounds
        self.num_streams = probe.forward.cache.num_streams
        self.sizes = captured_sizes(min(probe.drafter.depth, cost.max_budget) if is_chain else cost.max_budget)

    def typical(self) -> tuple[float, ...]:
        """Mean probability of each node of the largest trees, in steps that go on from places of the text. Backwards,
        since what a step emits takes the place of the text behind it."""
        self.probe.capture(self.sizes[-1], self.mode)
        places = np.linspace(self.cost.prefix_len[-1], self.cost.prefix_len[0], NUM_PLACES).astype(int)
        mean = np.mean([self.probe.probabilities(place) for place in places.tolist()], axis=(0, 1))
        return tuple(np.minimum(mean, 1.0).tolist())

    def overheads(self) -> list[Overhead]:
        """Of every size."""
        whole_s, cut_s = self._cut_seconds()
        return [
            Overhead(slots, self.num_streams, self._besides(slots), max(0.0, cut_s - whole_s)) for slots in self.sizes
        ]

    def _besides(self, slots: int) -> tuple[float, ...]:
        """By prefix length: the seconds of whole steps less what the cost model says of forwards of as many rows."""
        self.probe.capture(slots, self.mode)
        found = []
        for prefix_len in self.cost.prefix_len:
            seconds, rows = self._quickest(prefix_len)
            found.append(max(0.0, seconds - self.cost.seconds(self.num_streams, prefix_len, round(rows), slots)))
        return tuple(found)

    def _quickest(self, prefix_len: int) -> tuple[float, float]:
        """(seconds, rows) of the quickest of several rounds; the first of all is not counted."""
        return min([self.probe(prefix_len) for _ in range(2 + self.num_rounds)][2:])

    def _cut_seconds(self) -> tuple[float, float]:
        """Of steps whose trees stay whole, and of those that look where to cut and then cut off nothing."""
        slots = max(size for size in self.sizes if size <= CUT_SLOTS)
        if slots == 1:
            return 0.0, 0.0
        free = Surface(slots, self.num_streams, (self.num_streams,), ((1.0,),) * len(self.cost.prefix_len))
        cost = CostModel(self.cost.key, slots - 1, self.cost.prefix_len, (free,))
        none = [0.0] * self.num_streams
        cutter = Cutter(cost, self.num_streams, slots - 1, none, self.probe.forward.device, [slots])
        found = []
        for mode in (self.mode, self.mode._replace(cutter=cutter)):
            self.probe.capture(slots, mode)
            found.append(self._quickest(self.cost.prefix_len[0])[0])
        return found[0], found[1]


def _on_host(
    cost: CostModel, model: Model, drafter: AnyDrafter, is_chain: bool, text: list[int], num_streams: Sequence[int],
    num_rounds: int, use_graphs: bool | None,
) -> list[Overhead]:  # fmt: skip
    """By the stages of short generations with trees that are cut."""
    name, num_prefixes = drafter_key(drafter, is_chain), len(cost.prefix_len)
    nothing = tuple(Overhead(0, count, (0.0,) * num_prefixes) for count in num_streams)
    free = dataclasses.replace(cost, overhead={name: nothing})
    engine = Engine(model, drafter, "auto", use_graphs=use_graphs, cost=free, mode="chain" if is_chain else "tree")
    length = min(len(text) - 1, cost.prefix_len[min(1, num_prefixes - 1)])
    found = []
    for count in num_streams:
        prompts = [text[:length]] * count
        samples = [_beside(engine, prompts, free) for _ in range(1 + num_rounds)]
        found.append(Overhead(0, count, (max(0.0, min(samples[1:])),) * num_prefixes))  # the first one captures
    return found


def _beside(engine: Engine, prompts: list[list[int]], cost: CostModel) -> float:
    """Mean seconds of a step of a generation beside its forward: by the stages, or where a captured step holds some of
    them, the whole less what the cost model says of the forwards."""
    results = engine.generate_ddtree(prompts, NUM_TOKENS, stop_token_ids=())
    seconds = results[0].stats.seconds
    num_steps = max(r.stats.num_target_forwards for r in results)
    if cost.key.kind == "host":
        return sum(seconds[stage] for stage in STAGES if stage not in ("prefill", "verify")) / num_steps
    taken = sum(seconds[stage] for stage in STAGES if stage != "prefill")
    forwards = 0.0
    for counts in itertools.zip_longest(*(r.stats.nodes_per_step for r in results), fillvalue=0):
        num_active = sum(count > 0 for count in counts)
        forwards += cost.seconds(num_active, len(prompts[0]), sum(counts), num_tree_slots(max(counts)))
    return (taken - forwards) / num_steps
