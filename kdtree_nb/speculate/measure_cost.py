"""Measure a cost model: target forwards over trees of many sizes behind real text, and whole steps with a drafter."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tqdm.auto import tqdm

from kdtree_nb.config import MAX_BUDGET
from kdtree_nb.drafters import AnyDrafter
from kdtree_nb.model import Model
from kdtree_nb.speculate.cost import CostModel, Surface
from kdtree_nb.speculate.cost_store import cost_key
from kdtree_nb.speculate.engine import Engine
from kdtree_nb.speculate.measure_drafting import NUM_TOKENS, with_drafter
from kdtree_nb.speculate.mode import captured_sizes
from kdtree_nb.speculate.probes import DeviceProbe, HostProbe

NUM_STREAMS = (1, 4, 10)
PREFIX_LEN = (32, 512, 2048)
NUM_ROUNDS = 7
"""Samples of a point, of which the quickest counts: whatever else runs on the machine only adds."""

NUM_WARM = 2
"""Untimed calls in front of the timed ones; the second call of a shape may still capture it."""

Probe = Callable[[int, int], float]
"""(prefix_len, nodes of each stream) -> seconds of a forward over such trees, sampled once."""


@dataclasses.dataclass(frozen=True)
class Effort:
    """What is measured: trees of up to max_budget nodes, for these numbers of streams and lengths of text.

    prefix_len: None for those of PREFIX_LEN that the model has room for
    """

    max_budget: int = 64
    num_streams: tuple[int, ...] = NUM_STREAMS
    prefix_len: tuple[int, ...] | None = None
    num_rounds: int = NUM_ROUNDS

    def __post_init__(self) -> None:
        if not 1 <= self.max_budget <= MAX_BUDGET:
            raise ValueError(f"calibrate: max_budget: expected 1 … {MAX_BUDGET}, got {self.max_budget}")
        if self.num_rounds < 1:
            raise ValueError(f"calibrate: num_rounds: expected at least 1, got {self.num_rounds}")
        for name in ("num_streams", "prefix_len"):
            values = getattr(self, name)
            if values is None and name == "prefix_len":
                continue
            if not values or min(values) < 1 or list(values) != sorted(set(values)):
                raise ValueError(f"calibrate: {name}: expected ascending positive integers, got {values}")

    def within(self, longest: int) -> Effort:
        """The same with prefix lengths for a model of `longest` positions. Raises ValueError where one given does not
        fit: behind it must be room for the trees of two steps and the texts of a drafter."""
        room = longest - 2 * (self.max_budget + 1) - NUM_TOKENS
        if self.prefix_len is None:
            return dataclasses.replace(self, prefix_len=tuple(p for p in PREFIX_LEN if p <= room) or (max(1, room),))
        if self.prefix_len[-1] > room:
            raise ValueError(
                f"calibrate: prefix_len: expected at most {room}, which leaves room for trees of {self.max_budget} "
                f"nodes in the model's {longest} positions (max_position_embeddings), got {self.prefix_len[-1]}; leave "
                "it out"
            )
        return self

    def sizes(self) -> list[int]:
        """Nodes of a stream's tree, root included: those of captured steps."""
        return captured_sizes(self.max_budget)


def calibrate(
    model: Model, drafters: AnyDrafter | Sequence[AnyDrafter] = (), effort: Effort | None = None,
    use_graphs: bool | None = None, show_progress: bool = False,
) -> CostModel:  # fmt: skip
    """The cost model of this device, model, dtype and build, with what steps of each drafter take besides.

    `save_cost` keeps it for `Engine(budget="auto")`. Takes seconds. The text is this package's own source. Raises
    ValueError, before anything is measured, for a length of text that the model has no room for.
    """
    effort = (effort or Effort()).within(model.config.max_position_embeddings)
    drafters = list(drafters) if isinstance(drafters, Sequence) else [drafters]
    kind = Engine(model, use_graphs=use_graphs)._kind.name
    text = source_text(model, effort.prefix_len[-1] + effort.max_budget + 2)
    with torch.inference_mode():
        surfaces = _surfaces(model, kind, text, effort, show_progress)
    cost = CostModel(cost_key(model, kind), effort.max_budget, effort.prefix_len, tuple(surfaces))
    asked = list(itertools.product(drafters, (False, True)))
    for drafter, is_chain in tqdm(asked, desc="calibrate", unit="drafter", disable=not show_progress):
        cost = with_drafter(cost, model, drafter, is_chain, text, effort.num_streams, effort.num_rounds, use_graphs)
    return cost


def source_text(model: Model, num_tokens: int) -> list[int]:
    """Token ids of this folder's source files, repeated if they are few."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py")))
    ids = model.tokenizer.encode(text)
    return list(itertools.islice(itertools.cycle(ids), num_tokens))


def _surfaces(model: Model, kind: str, text: list[int], effort: Effort, show_progress: bool) -> list[Surface]:
    """A surface for each number of streams, and on a device for each size of captured steps."""
    sizes, surfaces = effort.sizes(), []
    for num_streams in tqdm(effort.num_streams, desc="calibrate", unit="batch", disable=not show_progress):
        if kind == "host":
            probe = HostProbe(model, num_streams, text, effort.prefix_len[-1], effort.max_budget)
            surfaces.append(_measure(probe, num_streams, 0, sizes, effort))
            continue
        device_probe = DeviceProbe(model, num_streams, text, effort.prefix_len[-1], effort.max_budget)
        for below, size in zip([0, *sizes], sizes, strict=False):
            device_probe.capture(size)
            counts = sizes if size == sizes[-1] else sorted({below + 1, size})
            surfaces.append(_measure(device_probe, num_streams, size, counts, effort))
    return surfaces


def _measure(probe: Probe, num_streams: int, num_slots: int, sizes: list[int], effort: Effort) -> Surface:
    """The quickest of several rounds that visit every point once, so that a disturbance hits few samples of a point."""
    points = list(itertools.product(effort.prefix_len, sizes))
    for point in points:
        for _ in range(NUM_WARM):
            probe(*point)
    rounds = [[probe(*point) for point in points] for _ in range(effort.num_rounds)]
    quickest = iter(map(min, zip(*rounds, strict=True)))
    seconds = tuple(tuple(next(quickest) for _ in sizes) for _ in effort.prefix_len)
    return Surface(num_slots, num_streams, tuple(num_streams * size for size in sizes), seconds)
