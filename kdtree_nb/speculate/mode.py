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

AUTO = "auto"
"""The budget that a cost model chooses, step by step."""

MODES = ("tree", "chain")


class Mode(NamedTuple):
    """is_chain: the likeliest token of every depth and no other; cutter: cuts what was built, or None."""

    is_chain: bool = False
    cutter: Cutter | None = None

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


@dataclasses.dataclass
class Auto:
    """The cutters of an engine, by drafter, number of streams and mode.

    kind: "host" or "device": who leads a step
    """

    model: Model
    kind: str
    cost: CostModel
    _cutters: dict[tuple[str, int, bool], Cutter] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, model: Model, kind: str, cost: CostModel | None) -> Auto:
        """By the given cost model, or by that of the user's folder. Raises CalibrationError: none there, or stale."""
        if cost is None:
            return cls(model, kind, load_cost(model, kind))
        if not isinstance(cost, CostModel):
            raise ValueError(f"Engine: cost: expected a CostModel, as calibrate gives, got {type(cost).__name__}")
        check_cost(cost, cost_key(model, kind), "the cost model given", "kdtree_nb.speculate.calibrate(model, drafter)")
        return cls(model, kind, cost)

    def cutter(self, drafter: AnyDrafter, num_streams: int, is_chain: bool) -> Cutter:
        """What cuts the trees of a batch; its max_budget is the most that a stream may draft."""
        key = drafter_key(drafter), num_streams, is_chain
        if key not in self._cutters:
            self._cutters[key] = self._new_cutter(drafter, num_streams, is_chain)
        return self._cutters[key]

    def _new_cutter(self, drafter: AnyDrafter, num_streams: int, is_chain: bool) -> Cutter:
        name = drafter_key(drafter)
        overhead_s = [self.cost.overhead_s(name, count) for count in range(1, num_streams + 1)]
        largest = self._largest(drafter, overhead_s, is_chain)
        sizes = [0] if self.kind == "host" else sorted({num_tree_slots(n) for n in range(1, largest + 2)})
        return Cutter(self.cost, num_streams, largest, overhead_s, self.model.device, sizes)

    def _largest(self, drafter: AnyDrafter, overhead_s: list[float], is_chain: bool) -> int:
        """The largest budget that can pay for any number of streams, as large as captured steps are."""
        useful = max(self.cost.useful_budget(n, drafter.depth, s) for n, s in enumerate(overhead_s, start=1))
        return min(useful, drafter.depth) if is_chain else min(num_tree_slots(useful + 1) - 1, self.cost.max_budget)
