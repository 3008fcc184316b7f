"""One tensor-parallel rank with random weights, and one decode step of it behind a prefix of any length."""

from __future__ import annotations

import contextlib
import copy
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from kdtree_nb.bench.lone_ranks import LoneGroup
from kdtree_nb.bench.random_weights import RandomSource
from kdtree_nb.bench.runner import Sample, clock, require
from kdtree_nb.config import MAX_BUDGET
from kdtree_nb.hf.config import HfConfig
from kdtree_nb.hf.step_work import rank_config
from kdtree_nb.model import LatentCache, Model
from kdtree_nb.model.build import build
from kdtree_nb.model.checkpoint import fingerprint
from kdtree_nb.model.moe import MoeFeedForward
from kdtree_nb.model.ranks import ONE_RANK, Ranks
from kdtree_nb.model.transformer import Layer
from kdtree_nb.native import ops
from kdtree_nb.native.capture import Capture
from kdtree_nb.native.cuda_graph import CudaGraph
from kdtree_nb.native.devices import memory_for
from kdtree_nb.parallel import TensorParallel
from kdtree_nb.tree import DraftTree

DTYPE = torch.bfloat16


class Rank:
    """One of num_ranks ranks of a model, random; a cache of one stream, random; how long making them took.

    model:     its products leave parts of sums, which are added with those of the other ranks, or with what a LoneGroup
               gives
    alone:     the same weights without the others: products end in what the rank's own part gives
    config:    what this rank computes (`rank_config`)
    num_slots: of the cache, which every step shares
    as_stored: leave INT4 experts as a checkpoint stores them, so that products make floats of them, until `pack_int4`
    ranks:     the num_ranks that are there; default: rank 0 alone. Raises ValueError for another number of them
    """

    def __init__(
        self, config: HfConfig, num_ranks: int, device: torch.device, num_slots: int, as_stored: bool = False,
        ranks: Ranks | None = None,
    ) -> None:  # fmt: skip
        ranks = ranks or (ONE_RANK if num_ranks == 1 else TensorParallel(LoneGroup(num_ranks, device)))
        if ranks.num_ranks != num_ranks:
            raise ValueError(f"bench k26: expected {num_ranks} ranks, of which one is built, got {ranks.num_ranks}")
        begin = time.perf_counter()
        with memory_for("bench k26: expected memory for one rank", device, "Use fewer --layers or shorter --prefix."):
            self.model = build(config.model, RandomSource(config, device, DTYPE, keeps_words=as_stored), ranks)
            if not as_stored:
                self.pack_int4()
            self.weight_bytes = _num_bytes(self.model.tensors())
            self.cache: LatentCache = self.model.new_cache(1, num_slots)
            self.cache.data.normal_(generator=torch.Generator(device).manual_seed(0))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.config, self.num_ranks, self.device = rank_config(config, num_ranks), num_ranks, device
        self.alone, self.build_s = self.with_ranks(ONE_RANK), time.perf_counter() - begin
        self.prefix_len = torch.zeros(1, dtype=torch.int32, device=device)
        if num_ranks > 1:
            ranks.agree("bench k26 (configuration, weights)", fingerprint(self.model))

    @property
    def experts(self) -> list[MoeFeedForward]:
        """The feed-forward blocks with experts."""
        return [x.feed_forward for x in self.model.layers if isinstance(x.feed_forward, MoeFeedForward)]

    def pack_int4(self) -> None:
        """Bring INT4 experts that are still as stored into the order in which products read them."""
        for moe in self.experts:
            e = moe.experts
            if e.gate_up_scale is not None and e.down_scale is not None:
                gate_up, down = ops.pack_int4(e.gate_up, e.gate_up_scale), ops.pack_int4(e.down, e.down_scale)
                moe.experts = e._replace(gate_up=gate_up, down=down, gate_up_scale=None, down_scale=None)
                del e
                if gate_up.is_cuda:  # packed ones are larger than the words, whose memory would lie idle
                    torch.cuda.empty_cache()
        self.alone = self.with_ranks(ONE_RANK)

    def with_ranks(self, ranks: Ranks) -> Model:
        """The same weights, with other `ranks`."""
        m = self.model
        layers = [Layer(_with_ranks(x.attention, ranks), _with_ranks(x.feed_forward, ranks)) for x in m.layers]
        return Model(m.config, m.embedding, layers, m.norm, m.head, ranks)

    @staticmethod
    @contextlib.contextmanager
    def listening(model: Model) -> Iterator[list[Tensor]]:
        """A list that gets the expert ids [T, k] of every layer of the forwards of `model` inside."""
        chosen: list[Tensor] = []

        def listen(route: Callable[..., tuple[Tensor, Tensor, Tensor]], *args: Tensor) -> tuple[Tensor, ...]:
            found = route(*args)
            chosen.append(found[1])
            return found

        experts = [x.feed_forward for x in model.layers if isinstance(x.feed_forward, MoeFeedForward)]
        before = [vars(moe).get("route") for moe in experts]
        for moe in experts:
            moe.route = functools.partial(listen, moe.route)
        try:
            yield chosen
        finally:
            for moe, route in zip(experts, before, strict=True):
                del moe.route
                if route is not None:
                    moe.route = route


def _num_bytes(tensors: list[Tensor]) -> int:
    """Of all tensors, each memory once."""
    return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())


def _with_ranks(part: Any, ranks: Ranks) -> Any:
    """A layer's part with the same weights."""
    other = copy.copy(part)
    other.ranks = ranks
    return other


def take_experts(model: Model, chosen: Sequence[Tensor]) -> None:
    """Let every layer with experts, in order, route and then take these expert ids i32 [T, k] instead. Raises
    ValueError unless there are as many of them as such layers."""
    experts = [x.feed_forward for x in model.layers if isinstance(x.feed_forward, MoeFeedForward)]
    if len(chosen) != len(experts):
        raise ValueError(
            f"take_experts: expected ids for each of {len(experts)} layers with experts, got {len(chosen)}"
        )

    def take(route: Callable[..., Sequence[Tensor]], ids: Tensor, *args: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h, _, weight = route(*args)
        return h, ids, weight

    for moe, ids in zip(experts, chosen, strict=True):
        moe.route = functools.partial(take, moe.route, ids)


class Verified(NamedTuple):
    """What a step leaves: logits f32 [T, V] (of several ranks this one's part), the token i64 [T] behind each row,
    num_accepted i32 [1]."""

    logits: Tensor
    token: Tensor
    num_accepted: Tensor


class Step:
    """Verify, accept and compact over one tree; the prefix stays where it is, so that a step can be repeated.

    model: of the rank, default: `alone`
    """

    def __init__(self, rank: Rank, tree: DraftTree, model: Model | None = None) -> None:
        self.rank, self.tree, self.model = rank, tree, model or rank.alone
        self.num_rows = tree.token.shape[1]

    def __call__(self) -> Verified:
        rank, tree = self.rank, self.tree
        rows = ops.tree_rows_padded(tree, rank.prefix_len)
        logits = self.model.forward(rows, tree, rank.cache, rank.prefix_len)
        token = self.model.ranks.argmax(logits, self.model.config.vocab_size, rows.num_rows)
        path, num_accepted, _ = ops.tree_accept(tree, token, max(1, self.num_rows - 1), rows.begin)
        if self.num_rows > 1:
            rank.cache.compact(rank.prefix_len, path, num_accepted)
        return Verified(logits, token, num_accepted)

    def experts(self) -> list[Tensor]:
        """The expert ids i32 [T, k] that the rows choose in each layer that has experts."""
        with self.rank.listening(self.model) as chosen:
            self()
        config = self.rank.config.model
        num_layers = config.num_hidden_layers - config.first_k_dense_replace
        require(len(chosen) == num_layers, "bench k26", f"{num_layers} layers with experts, heard of {len(chosen)}")
        return chosen

    def distinct_experts(self) -> float:
        """Experts that a layer wakes, on average over layers; 0 without routed experts."""
        chosen = self.experts()
        return sum(len(ids.unique()) for ids in chosen) / max(1, len(chosen))

    def captured(self, pool: tuple[int, int] | None) -> Repeatable[Verified]:
        """The step as one CUDA graph, after a first run that loads every kernel; on a CPU, its recorded calls, or of
        several ranks the step itself."""
        return captured(self, self.rank.device, pool, self.model.ranks.only_ops)


Result_co = TypeVar("Result_co", covariant=True)


class Repeatable(Protocol[Result_co]):
    """Work that can be done again, and what its last run left."""

    @property
    def result(self) -> Result_co:
        """Of the last run."""
        ...

    def replay(self) -> object:
        """Do it again."""
        ...


class Eager(Generic[Result_co]):
    """A function that is called again."""

    def __init__(self, function: Callable[[], Result_co]) -> None:
        self._function, self.result = function, function()

    def replay(self) -> None:
        """Call it."""
        self.result = self._function()


def captured(
    function: Callable[[], Result_co], device: torch.device, pool: tuple[int, int] | None, only_ops: bool
) -> Repeatable[Result_co]:  # fmt: skip
    """`function` as one CUDA graph, after a first run; on a CPU its recorded calls where it makes only_ops, else it."""
    function()
    if device.type == "cpu":
        return Capture(function) if only_ops else Eager(function)
    torch.cuda.empty_cache()
    return CudaGraph(function, device, pool)


def seconds_of(replay: Callable[[], object], device: torch.device) -> Sample:
    """Samples device seconds of one replay behind another, so that its launch is not waited for; on a CPU of a call."""
    if device.type == "cpu":
        return functools.partial(clock, replay)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def sample() -> float:
        torch.cuda.synchronize()
        replay()
        begin.record()
        replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3

    return sample


def bushy_tree(num_nodes: int, vocab_size: int, device: torch.device, seed: int = 0) -> DraftTree:
    """A tree of num_nodes nodes, root included, at most 8 deep, of random tokens: the worst case for experts. The root
    is the same for any num_nodes. Raises ValueError unless these are 1 … MAX_BUDGET + 1."""
    if not 1 <= num_nodes <= MAX_BUDGET + 1:
        raise ValueError(f"bushy_tree: expected 1 … {MAX_BUDGET + 1} nodes, got {num_nodes}")
    generator = torch.Generator().manual_seed(seed)
    token = torch.randint(vocab_size, (1, MAX_BUDGET + 1), generator=generator)[:, :num_nodes].contiguous()
    log_probs = (2.0 * torch.randn(1, 8, num_nodes, generator=generator)).log_softmax(-1)
    ids = torch.arange(num_nodes).expand(log_probs.shape).contiguous()
    best_first = log_probs.sort(-1, descending=True).values.contiguous()
    tree = ops.tree_build(best_first, ids, token[:, 0].contiguous(), num_nodes - 1)
    if int(tree.num_nodes[0]) != num_nodes:
        raise ValueError(f"bushy_tree: expected {num_nodes} nodes, got {int(tree.num_nodes[0])}. Use fewer.")
    fields = [token, *list(vars(tree).values())[1:]]
    return DraftTree(*(field.to(device) for field in fields))


def chain_of(tree: DraftTree, node: int) -> DraftTree:
    """The path from the root to `node` as a tree without branches."""
    path = tree.path(0, node)
    device, token = tree.token.device, tree.token[0, path].cpu()
    certain = torch.zeros(1, len(path) - 1, 1)
    chain = ops.tree_build(certain, token[1:].view(1, -1, 1).contiguous(), token[:1].clone(), len(path) - 1)
    return DraftTree(*(field.to(device) for field in vars(chain).values()))
