"""What several test modules of the engine share, besides the fixtures of `conftest.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from kdtree_nb import Engine
from kdtree_nb.model import Model, build_model
from kdtree_nb.speculate import Generation
from kdtree_nb.speculate import engine as engine_module
from kdtree_nb.speculate.cost import CostModel, Overhead, Surface
from kdtree_nb.speculate.cost_store import cost_key, drafter_key
from kdtree_nb.speculate.mode import captured_sizes
from kdtree_nb.tiny2 import tiny2_config, tiny2_weights

NUM_TOKENS = 24
"""What the AR texts of the fixture `ar` are long."""


def assert_same(got: Generation, want: Generation) -> None:
    """Tokens, logits and why the text ended."""
    assert got.tokens == want.tokens
    assert got.finish_reason == want.finish_reason
    assert torch.equal(got.logits, want.logits)  # false on NaN


def device_engine(model: Model, drafter=None, *args, **options) -> Engine:
    """An Engine whose steps the device takes, on a CPU too."""
    engine = Engine(model, drafter, *args, **options)
    engine._kind = engine_module.DEVICE
    return engine


def submit_all(engine: Engine, prompts: list[list[int]], counts: int | Sequence[int] = NUM_TOKENS, **options):
    """The handles of all prompts, each to emit its count of tokens or the one count."""
    counts = [counts] * len(prompts) if isinstance(counts, int) else counts
    return [engine.submit(p, n, stop_token_ids=(), **options) for p, n in zip(prompts, counts, strict=True)]


def linear_cost(
    model: Model, kind: str, drafter, per_row: float, max_budget: int = 16, per_slot: float = 0.0, typical=()
) -> CostModel:
    """1 second, per_row for every row, and of a captured step per_slot for every slot of all streams."""

    def seconds(size: int, num_rows: int, S: int) -> float:
        return 1 + per_slot * S * size + per_row * num_rows

    surfaces = tuple(
        Surface(size, S, (S, S * (max_budget + 1)), ((seconds(size, S, S), seconds(size, S * (max_budget + 1), S)),))
        for S in (1, 10)
        for size in ([0] if kind == "host" else captured_sizes(max_budget))
    )
    names = [drafter_key(drafter, is_chain) for is_chain in (False, True)]
    nothing = {name: (Overhead(0, 1, (0.0,)),) for name in names}
    return CostModel(cost_key(model, kind), max_budget, (1,), surfaces, nothing, {names[0]: typical} if typical else {})


def cost_of(model: Model, drafter, best: int, typical: Sequence[float] = ()) -> CostModel:
    """Of steps that the device takes, by which one size is far better than all others."""
    most = 32
    seconds = {n: 1.0 if n == best else 5.9 for n in captured_sizes(most)}
    surfaces = tuple(Surface(n, S, (S, S * (most + 1)), ((seconds[n],) * 2,)) for n in seconds for S in (1, 10))
    names = [drafter_key(drafter, is_chain) for is_chain in (False, True)]
    overhead = {name: (Overhead(0, 1, (0.0,), 0.05),) for name in names}
    known = {names[0]: typical} if len(typical) else {}
    return CostModel(cost_key(model, "device"), most, (1,), surfaces, overhead, known)


def poisoned_model(token: int, device: torch.device) -> Model:
    """tiny2 whose embedding of one token is NaN: any row of that token has NaN logits."""
    weights = tiny2_weights()
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].copy()
    weights["model.embed_tokens.weight"][token] = np.nan
    return build_model(tiny2_config(), weights, device)


class Broken:
    """Drafts on the device: logits of `shape`, of which `fill(logits, state)` says what they hold."""

    def __init__(self, depth: int, shape: tuple[int, int, int], fill: Callable) -> None:
        self.depth, self.shape, self.fill = depth, shape, fill

    def draft(self, context):
        raise AssertionError("asked on the host")

    def draft_on_device(self, state):
        logits = torch.zeros(self.shape, device=state.bonus.device)
        self.fill(logits, state)
        return logits
