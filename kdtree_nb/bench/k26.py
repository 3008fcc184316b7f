"""Kimi K2.6 at its true dimensions: one of N tensor-parallel ranks with random weights, and one whole layer."""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from kdtree_nb.bench import k26_prefill, lab
from kdtree_nb.bench.end_to_end import end_to_end
from kdtree_nb.bench.k26_cell import SHARE, Cell
from kdtree_nb.bench.k26_sizes import CONFIG, single_layer, small, with_layers
from kdtree_nb.bench.kernel_times import kernel_times
from kdtree_nb.bench.lab import Lab, dtype_name
from kdtree_nb.bench.rank import DTYPE, Rank, Step, bushy_tree, chain_of
from kdtree_nb.bench.runner import Effort, Group, Measurement, per_call
from kdtree_nb.config import MAX_BUDGET
from kdtree_nb.hf.config import HfConfig, read_config
from kdtree_nb.hf.step_work import rank_config
from kdtree_nb.model.ranks import check_num_ranks
from kdtree_nb.parallel.tensor_parallel import MAX_GATHERED_ROWS

ROWS = (1, 2, 4, 8, 16, 32, 64)
PREFIX_LENS = (1024, 8192, 32_768, 131_072)
SMALL_ROWS = (1, 4, 16)
SMALL_PREFIX_LENS = (64, 512)
LAUNCH_ROWS = (1, 16)
"""Rows for which launching from Python is measured as well."""

FLOATS_FIRST_ROWS = (1, 8, 64)
"""Rows for which the layer is also measured with INT4 experts that are made floats in memory."""

REDUCE_US = 10.0
"""Assumed microseconds of one sum over ranks, for the projection alone."""

CASES_PER_TREE, EXACT_ROWS, EXACT_PREFIX_LEN = 20, 64, 4096
"""Exactness: random cases asked for per tree that is drawn, its most rows, and the longest prefix in front of it."""


def k26_lab(device: str, effort: Effort) -> Lab:
    """A lab for it; on a CPU by the clock, with ceilings that are measured in a moment."""
    if device != "cpu":
        return Lab(device, num_rounds=effort.num_rounds)
    dims = dict.fromkeys((torch.bfloat16, torch.float32), 256)
    return Lab(device, lambda calls: per_call(calls[0]), per_call, lambda call: call, effort.num_rounds, 2**25, dims)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured: a rank of `config` split num_ranks ways; for each of `rows`, behind each of `prefix_lens`."""

    config: HfConfig
    num_ranks: int
    rows: Sequence[int]
    prefix_lens: Sequence[int]
    reduce_us: float = REDUCE_US

    def __post_init__(self) -> None:
        for name in ("rows", "prefix_lens"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise ValueError(f"bench k26: {name}: expected positive integers, got {list(values)}")
            if len(set(values)) < len(values):
                raise ValueError(f"bench k26: {name}: expected each once, got {list(values)}. Leave out repeated ones.")
        if max(self.rows) > MAX_BUDGET + 1:
            raise ValueError(
                f"bench k26: rows: expected at most {MAX_BUDGET + 1}, those of a tree, got {max(self.rows)}"
            )
        rank_config(self.config, self.num_ranks)
        check_num_ranks(self.num_ranks)
        if self.num_ranks > 1 and max(self.rows) > MAX_GATHERED_ROWS:
            raise ValueError(
                f"bench k26: rows: expected at most {MAX_GATHERED_ROWS}, whose sums every rank gathers, got "
                f"{max(self.rows)} for one of {self.num_ranks} ranks. Use fewer, or --tp-rank-of 1."
            )
        if not (math.isfinite(self.reduce_us) and self.reduce_us >= 0):
            raise ValueError(f"bench k26: reduce_us: expected 0 or more microseconds, got {self.reduce_us}")
        if self.num_slots > self.config.model.max_position_embeddings:
            raise ValueError(
                f"bench k26: prefix_lens: expected at most {self.config.model.max_position_embeddings} positions with "
                f"the rows, got {self.num_slots}"
            )

    @property
    def is_published(self) -> bool:
        """Whether layers have the published dimensions."""
        return self.config.model.hidden_size == read_config(Path(CONFIG)).model.hidden_size

    @property
    def num_prefill_tokens(self) -> int:
        """Length of the text that is prefilled: what the longest prefix has room for."""
        return min(k26_prefill.PREFILL_TOKENS, max(self.prefix_lens))

    @property
    def num_slots(self) -> int:
        """Slots of the cache."""
        return max(self.prefix_lens) + max(*self.rows, EXACT_ROWS)

    @classmethod
    def published(cls, num_ranks: int, num_layers: int | None = None, is_small: bool = False, **given: Any) -> Plan:
        """For the published dimensions, or their small form; given: what differs from the usual rows and prefixes."""
        config = read_config(Path(CONFIG))
        config = small(config) if is_small else config
        config = config if num_layers is None else with_layers(config, num_layers)
        usual = {"rows": SMALL_ROWS, "prefix_lens": SMALL_PREFIX_LENS} if is_small else {}
        usual = {"rows": ROWS, "prefix_lens": PREFIX_LENS} | usual
        return cls(config, num_ranks, **(usual | {k: v for k, v in given.items() if v is not None}))


def k26_groups(where: Lab, plan: Plan) -> dict[str, Group]:
    """The groups by name, in the order in which they share the memory of the device: the whole layer comes first."""
    bench = _Bench(where, plan)
    functions: dict[str, Callable[..., Iterable[Measurement]]] = {
        "bandwidth": functools.partial(lab.bandwidth, where),
        "matmul": functools.partial(lab.matmul, where),
        "k26_prefill_product": bench.products,
        "k26_layer": bench.layer,
        "k26_step": bench.steps,
    }
    if plan.is_published:
        functions["end_to_end"] = functools.partial(end_to_end, where)
    if where.device.type == "cuda":
        functions["k26_kernels"] = bench.kernels
    return dict(functions)


class _Bench:
    """Measures a plan in a lab. What takes long yields each measurement when it is made."""

    def __init__(self, where: Lab, plan: Plan) -> None:
        self.lab, self.plan = where, plan

    def products(self, effort: Effort) -> list[Measurement]:
        """The dense products of a prefill: `k26_prefill.products`."""
        plan = self.plan
        return k26_prefill.products(self.lab, plan.config, plan.num_ranks, plan.num_prefill_tokens, effort)

    def layer(self, effort: Effort) -> Iterator[Measurement]:
        """One layer with experts at full width, on one device: `k26_layer/captured`; for some rows behind the first
        prefix also with INT4 experts that are made floats in memory: `k26_layer/floats first`."""
        rank = Rank(single_layer(self.plan.config), 1, self.lab.device, self.plan.num_slots, as_stored=True)
        rows = [n for n in self.plan.rows if n in FLOATS_FIRST_ROWS]
        yield from self._sweep("k26_layer/floats first", rank, effort, rows, self.plan.prefix_lens[:1])
        rank.pack_int4()
        free(self.lab.device)
        yield from self._sweep("k26_layer/captured", rank, effort, self.plan.rows, self.plan.prefix_lens)
        yield from exactness("k26_layer_rows", rank, effort)

    def steps(self, effort: Effort) -> Iterator[Measurement]:
        """Whole steps of one rank: build and memory, times, launches, exactness, and what they add up to; a prefill."""
        free(self.lab.device)
        rank = Rank(self.plan.config, self.plan.num_ranks, self.lab.device, self.plan.num_slots)
        rows, prefix_lens = self.plan.rows, self.plan.prefix_lens
        steps = []
        for measured in self._sweep("k26_step/captured", rank, effort, rows, prefix_lens):
            steps.append(measured)
            yield measured
        yield from self._projection(steps) + self._memory(rank)
        yield from exactness("k26_step_rows", rank, effort)
        prefill = k26_prefill.Prefill(rank, self.plan.num_prefill_tokens)
        yield from prefill.measure(self.lab, effort)
        yield from prefill.exactness()

    def kernels(self, effort: Effort) -> Iterator[Measurement]:
        """Where a step of one rank goes, behind the first prefix: seconds of each kernel and how often it runs."""
        free(self.lab.device)
        rank = Rank(self.plan.config, self.plan.num_ranks, self.lab.device, self.plan.num_slots)
        rank.prefix_len.fill_(self.plan.prefix_lens[0])
        pool, config = torch.cuda.graph_pool_handle(), rank.config.model
        place = {"tp": rank.num_ranks, "layers": config.num_hidden_layers, "prefix_len": self.plan.prefix_lens[0]}
        for num_rows in (n for n in self.plan.rows if n in LAUNCH_ROWS):
            step = Step(rank, bushy_tree(num_rows, config.vocab_size, rank.device)).captured(pool)
            for kernel in kernel_times(step.replay, rank.device):
                params = place | {"rows": num_rows, "launches": kernel.launches}
                yield Measurement(f"k26_kernels/{kernel.name}", [kernel.seconds], params)

    def _sweep(
        self, name: str, rank: Rank, effort: Effort, rows: Sequence[int], prefix_lens: Sequence[int]
    ) -> Iterator[Measurement]:  # fmt: skip
        """Every number of rows behind every prefix; one capture serves all prefixes, as in the engine."""
        vocab_size = rank.model.config.vocab_size
        pool = torch.cuda.graph_pool_handle() if rank.device.type == "cuda" else None
        for num_rows in effort.some(rows):
            step = Step(rank, bushy_tree(num_rows, vocab_size, rank.device))
            cell = Cell(self.lab, name, step, pool)
            for prefix_len in effort.some(prefix_lens):
                rank.prefix_len.fill_(prefix_len)
                yield from cell.measure(prefix_len, effort)
                if cell.group == "k26_step" and num_rows in LAUNCH_ROWS and prefix_len == self.plan.prefix_lens[0]:
                    yield from cell.launches(effort)

    def _projection(self, results: Sequence[Measurement]) -> list[Measurement]:
        """A PROJECTION, measured by nobody: steps of all ranks, from one rank's and an assumed cost of each sum."""
        num_reduces, found = 2 * self.plan.config.model.num_hidden_layers, []
        source = SHARE if self.plan.num_ranks > 1 else "captured"
        assumed = {"projection": True, "source": source, "num_reduces": num_reduces}
        assumed["assumed_reduce_us"] = self.plan.reduce_us
        added = num_reduces * self.plan.reduce_us * 1e-6
        for m in (m for m in results if m.name == f"k26_step/{source}"):
            found.append(Measurement("k26_projection/all ranks", [s + added for s in m.samples], m.params | assumed))
        return found

    def _memory(self, rank: Rank) -> list[Measurement]:
        """Bytes of weights and cache, of everything at its peak, and the seconds that making it all took."""
        params = {"tp": self.plan.num_ranks, "layers": rank.config.model.num_hidden_layers}
        sizes = {"weights": rank.weight_bytes, "cache": rank.cache.num_bytes}
        if rank.device.type == "cuda":
            sizes["peak"] = torch.cuda.max_memory_allocated(rank.device)
        found = [Measurement(f"k26_memory/{name}", [size], params, "byte") for name, size in sizes.items()]
        return [Measurement("k26_build/random weights", [rank.build_s], params), *found]


def exactness(group: str, rank: Rank, effort: Effort) -> list[Measurement]:
    """Rows of trees whose logits differ in any bit from those of the same text without branches: none should.

    The first row of each tree is compared with a step of that row alone, the others with a chain up to them.
    """
    generator, changed, num_rows = torch.Generator().manual_seed(1), 0, 0
    num_trees = max(1, effort.num_cases // CASES_PER_TREE)
    longest = min(EXACT_PREFIX_LEN, rank.cache.num_slots - EXACT_ROWS)
    for seed in range(num_trees):
        rank.prefix_len.fill_(int(torch.randint(longest + 1, (1,), generator=generator)))
        size = int(torch.randint(2, EXACT_ROWS + 1, (1,), generator=generator))
        tree = bushy_tree(size, rank.model.config.vocab_size, rank.device, seed)
        together = Step(rank, tree, rank.model)().logits
        for node in {0, *torch.randint(1, size, (4,), generator=generator).tolist()}:
            alone = Step(rank, chain_of(tree, node), rank.model)().logits[-1]
            changed, num_rows = changed + (not torch.equal(alone, together[node])), num_rows + 1
    params = {
        "tp": rank.num_ranks,
        "cases": num_trees,
        "rows": num_rows,
        "changed_rows": changed,
        "dtype": dtype_name(DTYPE),
    }
    return [Measurement(f"{group}/native", [num_rows], params, "row")]


def free(device: torch.device) -> None:
    """Give back what earlier groups held, and count the peak of memory from here."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
