"""Steps of Kimi K2.6 over a tree, by one rank: captured, as it is among others, and launched from Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kdtree_nb.bench.lab import Lab
from kdtree_nb.bench.lone_ranks import LoneShare
from kdtree_nb.bench.rank import DTYPE, Step, seconds_of, take_experts
from kdtree_nb.bench.runner import Effort, Measurement, Sample, compete, require
from kdtree_nb.hf.step_work import step_work
from kdtree_nb.model.ranks import Ranks

NUM_ROUNDS = 7
"""Samples of a cell: a step takes milliseconds, and there are many."""

SHARE, STAND_IN = "share", "with stand-in for sums"
"""Contenders that are a rank among several: with its own part of every sum, and with zeros for the others' gathered."""

_PLACE = ("tp", "layers", "hidden", "rows", "prefix_len")


class Cell:
    """Steps of one number of rows: of the rank alone under the name of the cell, and where there are several ranks as
    one of them, which takes the experts of the rank alone: how many wake is most of a step's time."""

    def __init__(self, where: Lab, name: str, step: Step, pool: tuple[int, int] | None) -> None:
        self.lab, self.step, self.num_ranks = where, step, step.rank.num_ranks
        self.group, _, self.name = name.partition("/")
        self.parts = {self.name: step.captured(pool)}
        if self.num_ranks > 1:
            self.chosen = step.experts()
            ranks = step.rank.model.ranks
            among = {SHARE: LoneShare(self.num_ranks, ranks.rank), STAND_IN: ranks}
            self.parts |= {name: self._among(r).captured(pool) for name, r in among.items()}

    def measure(self, prefix_len: int, effort: Effort) -> list[Measurement]:
        """Seconds of a step behind prefix_len tokens. Raises ValueError unless the rank's prefix stands there, or where
        the cache has no room for the rows behind it."""
        self._expect_prefix(prefix_len)
        experts = self.step.distinct_experts()
        if self.num_ranks > 1:
            for taken, now in zip(self.chosen, self.step.experts(), strict=True):
                taken.copy_(now)
        for part in self.parts.values():
            part.replay()
        logits = {name: part.result.logits for name, part in self.parts.items()}
        require(torch.equal(logits[self.name], self.step().logits), self.group, "the logits, captured and eager")
        if self.num_ranks > 1:
            require(torch.equal(logits[SHARE], logits[STAND_IN]), self.group, "the logits of a rank among others")
        contenders = {name: self._sample(part.replay) for name, part in self.parts.items()}
        return compete(self.group, contenders, effort.num_rounds, self._params(prefix_len, experts))

    def launches(self, effort: Effort) -> list[Measurement]:
        """The step launched operation by operation, and replayed, both by the clock."""
        contenders = {"eager": self.lab.wall(self.step), "captured": self.lab.wall(self.parts[self.name].replay)}
        params = {k: v for k, v in self._params(int(self.step.rank.prefix_len), 0.0).items() if k in _PLACE}
        return compete("k26_launch", contenders, max(effort.num_rounds, NUM_ROUNDS), params)

    def _among(self, ranks: Ranks) -> Step:
        """The step of the rank with these `ranks`, whose rows route and then take the experts that are chosen."""
        model = self.step.rank.with_ranks(ranks)
        take_experts(model, self.chosen)
        return Step(self.step.rank, self.step.tree, model)

    def _expect_prefix(self, prefix_len: int) -> None:
        stands, most = int(self.step.rank.prefix_len), self.step.rank.cache.num_slots - self.step.num_rows
        if stands != prefix_len or not 0 <= prefix_len <= most:
            raise ValueError(
                f"bench k26: {self.group}/{self.name}: expected the rank's prefix at {prefix_len} tokens, and these at "
                f"most {most}, as the cache has to hold {self.step.num_rows} rows behind, got it at {stands}"
            )

    def _params(self, prefix_len: int, experts: float) -> dict[str, Any]:
        config = self.step.rank.config
        work = step_work(config, self.step.num_rows, prefix_len, experts)
        num_bytes = work.num_bytes
        if self.group == "k26_layer":  # the layer alone is meant
            num_bytes -= work.bytes_by_part["embedding"] + work.bytes_by_part["head"]
        place = {"tp": self.num_ranks, "layers": config.model.num_hidden_layers, "hidden": config.model.hidden_size,
                 "rows": self.step.num_rows, "prefix_len": prefix_len}  # fmt: skip
        alike = {"same_experts": True} if self.num_ranks > 1 else {}
        return place | {"distinct_experts": experts} | alike | self.lab.work(num_bytes, work.flops, DTYPE)

    def _sample(self, replay: Callable[[], object]) -> Sample:
        """See `seconds_of`; on a CPU of a call, over as many as last long enough."""
        if self.step.rank.device.type == "cpu":
            return self.lab.wall(replay)
        return seconds_of(replay, self.step.rank.device)
