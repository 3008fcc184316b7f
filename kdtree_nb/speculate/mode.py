"""How a budget is spent: on a chain, on the heaviest tree, or on as much of either as a cost model says pays."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from kdtree_nb.config import MAX_BUDGET
from kdtree_nb.drafters import AnyDrafter
from kdtree_nb.model import Model
from kdtree_nb.speculate.cost import CostModel
from kdtree_nb.speculate.cost_store import check_cost, cost_key, drafter_key, load_cost
from kdtree_nb.speculate.cut import Cutter
from kdtree_nb.speculate.sizer import Sizer

AUTO = "auto"
"""The budget that a cost model chooses, step by step."""

MODES = ("tree", "chain")


class Mode(NamedTuple):
    """is_chain: the likeliest token of every depth and no other; cutter: cuts what was built, or None; sizer: says how
    large a step to launch where the device drafts, or None."""

    is_chain: bool = False
    cutter: Cutter | None = None
    sizer: Sizer | None = None

    @property
    def width(self) -> int | None:
        """Candidates per depth that are looked at; None: all."""
        return 1 if self.is_chain else None

    def num_candidates(self, max_budget: int, vocab_size: int) -> int:
        """Candidates per depth that trees of at most max_budget nodes can use."""
        return 1 if self.is_chain else min(max_budget, vocab_size)


TREE = Mode()


def check_mode(mode: str) -> bool:
    """Whether `mode` is "chain". Raises ValueError unless it is one of MODES."""
    if mode not in MODES:
        raise ValueError(f"Engine: mode: expected one of {', '.join(MODES)}, got {mode!r}")
    return mode == "chain"


def num_tree_slots(num_nodes: int) -> int:
    """Slots for trees of up to `num_nodes` nodes: 1, 2, 3, 5, 9, 17, … 1024. Few sizes mean few captured graphs."""
    return num_nodes if num_nodes <= 2 else min(1 + (1 << (num_nodes - 2).bit_length()), MAX_BUDGET + 1)


def captured_sizes(most: int) -> list[int]:
    """Slots of the captured steps for trees of up to `most` drafted nodes, the largest for just as many."""
    return sorted({min(num_tree_slots(num_nodes), most + 1) for num_nodes in range(1, most + 2)})


@dataclasses.dataclass
class Auto:
    """The modes of an engine whose budget is chosen, by drafter, number of streams and mode.

    kind: "host" or "device": who leads a step
    """

    model: Model
    kind: str
    cost: CostModel
    _modes: dict[tuple[str, int], Mode] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, model: Model, kind: str, cost: CostModel | None) -> Auto:
        """By the given cost model, or by that of the user's folder. Raises CalibrationError: none there, or stale."""
        if cost is None:
            return cls(model, kind, load_cost(model, kind))
        if not isinstance(cost, CostModel):
            raise ValueError(f"Engine: cost: expected a CostModel, as calibrate gives, got {type(cost).__name__}")
        check_cost(cost, cost_key(model, kind), "the cost model given", "kdtree_nb.speculate.calibrate(model, drafter)")
        return cls(model, kind, cost)

    def mode(self, drafter: AnyDrafter, num_streams: int, is_chain: bool) -> Mode:
        """How a batch drafts; the max_budget of its cutter is the most that a stream may draft."""
        key = drafter_key(drafter, is_chain), num_streams
        if key not in self._modes:
            cut = self._host_sizes if self.kind == "host" else self._captured_sizes
            self._modes[key] = cut(drafter, num_streams, is_chain)
        return self._modes[key]

    def _host_sizes(self, drafter: AnyDrafter, num_streams: int, is_chain: bool) -> Mode:
        """Steps of as many rows as the host wants."""
        cost, name = self.cost, drafter_key(drafter, is_chain)
        overhead_s = [cost.overhead_s(name, count) for count in range(1, num_streams + 1)]
        useful = max(cost.useful_budget(n, drafter.depth, s) for n, s in enumerate(overhead_s, start=1))
        largest = min(useful, drafter.depth) if is_chain else min(num_tree_slots(useful + 1) - 1, cost.max_budget)
        return Mode(is_chain, Cutter(cost, num_streams, largest, overhead_s, self.model.device))

    def _captured_sizes(self, drafter: AnyDrafter, num_streams: int, is_chain: bool) -> Mode:
        """Steps of a few sizes: those up to the largest that can pay, however good the drafter: a step emits at most
        1 + depth tokens a stream, so it must not take longer than 1 + depth steps that draft nothing."""
        cost, name = self.cost, drafter_key(drafter, is_chain)
        most = min(drafter.depth, cost.max_budget) if is_chain else cost.max_budget
        sizes = captured_sizes(most)
        cutters = {slots: self._cutter(name, num_streams, slots) for slots in sizes}
        seconds = {slots: cutters[slots].seconds(num_streams, 0)[0] for slots in sizes}
        plain_s = seconds[1][num_streams]
        sizes = [n for n in sizes if seconds[n][n * num_streams] <= (1 + drafter.depth) * plain_s]
        cut_s = {slots: cost.cut_s(name, num_streams, slots) if slots > 1 else 0.0 for slots in sizes}
        sizer = Sizer({slots: cutters[slots] for slots in sizes}, cut_s, cost.typical.get(name, ()))
        overhead_s = [cost.overhead_s(name, count) for count in range(1, num_streams + 1)]
        cutter = Cutter(cost, num_streams, sizes[-1] - 1, overhead_s, self.model.device, sizes)
        return Mode(is_chain, cutter, sizer)

    def _cutter(self, name: str, num_streams: int, slots: int) -> Cutter:
        """Of steps of this many slots, which cut unless they draft nothing."""
        cost, counts = self.cost, range(1, num_streams + 1)
        cut_s = cost.cut_s(name, num_streams, slots) if slots > 1 else 0.0
        overhead_s = [cost.overhead_s(name, count, slots) + cut_s for count in counts]
        return Cutter(cost, num_streams, slots - 1, overhead_s, self.model.device, [slots])
