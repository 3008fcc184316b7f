"""Kimi K2.6 in numbers, from its published dimensions: memory of a rank, work of a step, a record if there is one."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

from kdtree_nb.hf.config import HfConfig, read_config
from kdtree_nb.hf.plan import Plan, make_plan
from kdtree_nb.hf.step_work import StepWork, expected_experts, rank_config, step_work
from kdtree_nb.viz.records import Record, Result

__all__ = [
    "FOLDER", "Plan", "StepWork", "config", "expected_experts", "measured_steps", "plan", "rank", "rank_memory",
    "recorded", "step_work",
]  # fmt: skip

FOLDER = Path(__file__).resolve().parents[2] / "data" / "kimi-k2.6"
"""Where config.json with the published dimensions lies."""


@functools.cache
def config() -> HfConfig:
    """The whole model."""
    return read_config(FOLDER)


@functools.cache
def rank(num_ranks: int = 8) -> HfConfig:
    """One of num_ranks tensor-parallel ranks, as a model of its own."""
    return rank_config(config(), num_ranks)


@functools.cache
def plan() -> Plan:
    """What the whole model takes, in BF16 with INT4 experts: what `kdtree-nb plan data/kimi-k2.6` prints."""
    return make_plan(config(), 2)


def rank_memory(num_ranks: int) -> dict[str, float]:
    """Part -> bytes of weights on one of num_ranks ranks."""
    found: dict[str, float] = {}
    for part in plan().parts:
        on_rank = part.num_bytes - part.split_bytes + part.split_bytes / num_ranks
        found[part.name] = found.get(part.name, 0.0) + on_rank
    return found


def recorded(records: Sequence[Record]) -> Record | None:
    """The first record of a rank with all layers at their true dimensions; None if nobody has run one."""
    model = config().model
    is_whole = {"layers": model.num_hidden_layers, "hidden": model.hidden_size}
    for record in records:
        steps = (r for r in record.results if r.name == "k26_step/captured")
        if any(is_whole.items() <= r.params.items() for r in steps):
            return record
    return None


def measured_steps(
    record: Record, prefix_len: int, contender: str = "captured", group: str = "k26_step"
) -> Mapping[int, Result]:  # fmt: skip
    """Rows -> the step behind prefix_len tokens, ascending; empty where the record has none."""
    name = f"{group}/{contender}"
    found = [r for r in record.results if r.name == name and r.params["prefix_len"] == prefix_len]
    return {r.params["rows"]: r for r in sorted(found, key=lambda r: r.params["rows"])}
