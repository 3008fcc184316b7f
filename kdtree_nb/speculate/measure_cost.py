"""Measure a cost model: target forwards over trees of many sizes behind real text, and whole steps with a drafter."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tqdm.auto import tqdm

from kdtree_nb.config import MAX_BUDGET
from kdtree_nb.drafters import AnyDrafter, DeviceDrafter
from kdtree_nb.model import Model
from kdtree_nb.native import ops
from kdtree_nb.speculate.cost import CostModel, Surface
from kdtree_nb.speculate.cost_store import cost_key, drafter_key
from kdtree_nb.speculate.device_forward import DeviceForward
from kdtree_nb.speculate.drafting import chain_trees
from kdtree_nb.speculate.engine import Engine
from kdtree_nb.speculate.forward import TreeForward
from kdtree_nb.speculate.mode import num_tree_slots
from kdtree_nb.speculate.stats import STAGES
from kdtree_nb.tree import DraftTree

NUM_STREAMS = (1, 4, 10)
PREFIX_LEN = (32, 512, 2048)
NUM_ROUNDS = 7
"""Samples of a point, of which the quickest counts: whatever else runs on the machine only adds."""

NUM_WARM = 2
"""Untimed calls in front of the timed ones; the second call of a shape may still capture it."""

STEPS_IN_FLIGHT = 4
"""Captured steps of a GPU that are timed together, as an engine launches them ahead."""

NUM_TOKENS = 32
"""Length of the texts that are generated to see what a drafter takes."""

PREFILL_TOKENS = 256

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
        """Nodes of a stream's tree, root included: those of captured steps, and the largest."""
        largest = self.max_budget + 1
        return sorted({num_tree_slots(n) for n in range(1, largest) if num_tree_slots(n) < largest} | {largest})


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
    overhead = {drafter_key(d): _overhead(model, d, cost, text, effort, use_graphs) for d in drafters}
    return dataclasses.replace(cost, overhead=overhead)


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
            probe = _HostProbe(model, num_streams, text, effort)
            surfaces.append(_measure(probe, num_streams, 0, sizes, effort))
            continue
        device_probe = _DeviceProbe(model, num_streams, text, effort)
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


class _HostProbe:
    """Times forwards that the host leads, on a cache that holds the text for every stream."""

    def __init__(self, model: Model, num_streams: int, text: list[int], effort: Effort) -> None:
        self.forward = TreeForward.allocate(model, num_streams, effort.prefix_len[-1] + effort.max_budget + 1)
        self.trees = _Trees(text, num_streams, effort.max_budget, model.config.vocab_size, model.device)
        _fill(self.forward, text[: effort.prefix_len[-1]])

    def __call__(self, prefix_len: int, num_nodes: int) -> float:
        self.forward.prefix_len.fill_(prefix_len)
        tree = self.trees(prefix_len, num_nodes)
        _wait_for(self.forward.model.device)
        start = time.perf_counter()
        self.forward(tree, num_nodes * tree.num_streams)
        _wait_for(self.forward.model.device)
        return time.perf_counter() - start


class _DeviceProbe:
    """Times steps that the device takes, with trees of the host, from launch to record."""

    def __init__(self, model: Model, num_streams: int, text: list[int], effort: Effort) -> None:
        room = STEPS_IN_FLIGHT * (effort.max_budget + 1)
        self.forward = DeviceForward.allocate(model, num_streams, effort.prefix_len[-1] + room + effort.max_budget + 1)
        host = torch.device("cpu")
        self.trees = _Trees(text, num_streams, effort.max_budget, model.config.vocab_size, host)
        self.num_steps = STEPS_IN_FLIGHT if model.device.type == "cuda" else 1
        _fill(self.forward, text[: effort.prefix_len[-1]])

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
        _wait_for(self.forward.device)
        start = time.perf_counter()
        places = [self.runner.launch() for _ in range(self.num_steps)]
        self.runner.wait(places[-1])
        return (time.perf_counter() - start) / self.num_steps


class _Trees:
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


def _fill(forward: TreeForward | DeviceForward, text: list[int]) -> None:
    """Put the text into the cache of every stream."""
    S, device = forward.cache.num_streams, forward.tree_device
    if isinstance(forward, DeviceForward):
        forward.state.active.fill_(1)
    for start in range(0, len(text), PREFILL_TOKENS):
        forward.prefill(chain_trees([text[start : start + PREFILL_TOKENS]] * S, device))


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _overhead(
    model: Model, drafter: AnyDrafter, cost: CostModel, text: list[int], effort: Effort, use_graphs: bool | None
) -> dict[int, float]:  # fmt: skip
    """Streams -> seconds of a step of DDTree beside the forward, over short generations with trees that are cut."""
    free = dataclasses.replace(cost, overhead={drafter_key(drafter): dict.fromkeys(effort.num_streams, 0.0)})
    engine = Engine(model, drafter, "auto", use_graphs=use_graphs, cost=free)
    length = min(len(text) - 1, effort.prefix_len[min(1, len(effort.prefix_len) - 1)])
    found = {}
    for num_streams in effort.num_streams:
        prompts = [text[:length]] * num_streams
        samples = [_beside(engine, prompts, free) for _ in range(1 + effort.num_rounds)]
        found[num_streams] = max(0.0, min(samples[1:]))  # the first one captures
    return found


def _beside(engine: Engine, prompts: list[list[int]], cost: CostModel) -> float:
    """Mean seconds of a step of a generation beside its forward: by the stages, or where a captured step holds them
    all, the whole less what the cost model says of the forwards."""
    results = engine.generate_ddtree(prompts, NUM_TOKENS, stop_token_ids=())
    seconds = results[0].stats.seconds
    num_steps = max(r.stats.num_target_forwards for r in results)
    if cost.key.kind == "host":
        return sum(seconds[stage] for stage in STAGES if stage not in ("prefill", "verify")) / num_steps
    taken = sum(seconds[stage] for stage in STAGES if stage != "prefill")
    cutter = engine._auto.cutter(engine.drafter, len(prompts), False)
    in_graph = isinstance(engine._spares[0].features.reader or engine.drafter, DeviceDrafter)
    forwards = 0.0
    for counts in itertools.zip_longest(*(r.stats.nodes_per_step for r in results), fillvalue=0):
        num_active = sum(count > 0 for count in counts)
        num_slots = cutter.max_budget + 1 if in_graph else num_tree_slots(max(counts))
        forwards += cost.seconds(num_active, len(prompts[0]), sum(counts), num_slots)
    return (taken - forwards) / num_steps
