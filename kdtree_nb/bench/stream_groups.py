"""Benchmarks of one to ten submitted streams: seconds of the same texts, and per token of one, by how many run.

The engine has NUM_SEATS seats and as many texts as are to run; when one has finished the next is submitted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from kdtree_nb.bench import setting
from kdtree_nb.bench.budget_groups import source_skip_gram
from kdtree_nb.bench.lab import Lab, dtype_name
from kdtree_nb.bench.prompt_sets import library_prompts, own_prompts
from kdtree_nb.bench.runner import Effort, Measurement, require
from kdtree_nb.drafters import AnyDrafter, DFlash, NGram
from kdtree_nb.model import Model
from kdtree_nb.speculate import Engine, Handle, calibrate
from kdtree_nb.speculate.measure_cost import Effort as CostEffort

NUM_SEATS = 10
COUNTS = (1, 2, 4, 6, 8, 10)
"""Streams that run together."""

NUM_TEXTS = 20
NUM_TOKENS = 64
MAX_SEQ_LEN = 512
BUDGET = 8
"""Of "tree"; a chain is as deep as its drafter goes."""

LENGTHS = (16, 64)
"""Shortest and longest prompt in tokens."""

MAX_ROUNDS = 3
"""A round decodes all texts with every contender and count."""


class Served(NamedTuple):
    """seconds: from the first submission to the last token; handles: one per text, in order."""

    seconds: float
    handles: list[Handle]

    @property
    def token_s(self) -> float:
        """Seconds per token of a text, from its seat in the batch to its last token: the mean over the texts."""
        times = [handle.latency for handle in self.handles]
        return statistics.fmean((t.token_s[-1] - t.seat_s) / len(t.token_s) for t in times if t.seat_s is not None)

    @property
    def nodes_per_step(self) -> float:
        """Rows of a stream in a step, the mean over the steps of all texts."""
        return statistics.fmean(count for handle in self.handles for count in handle.stats.nodes_per_step)

    @property
    def tau(self) -> float:
        """Tokens per target forward of a stream, pooled over all texts."""
        return sum(h.stats.num_tokens for h in self.handles) / sum(h.stats.num_target_forwards for h in self.handles)


def serve(engine: Engine, prompts: Sequence[list[int]], num_streams: int, num_tokens: int) -> Served:
    """Decode all prompts, `num_streams` of them at a time."""
    start, handles = time.perf_counter(), []
    while len(handles) < len(prompts) or not handles[-1].is_finished:
        num_free = num_streams - sum(not handle.is_finished for handle in handles)
        for prompt in prompts[len(handles) : len(handles) + num_free]:
            handles.append(engine.submit(prompt, num_tokens, stop_token_ids=()))
        engine.step()
    engine.run()
    return Served(time.perf_counter() - start, handles)


def engines(model: Model, drafter: AnyDrafter, effort: Effort) -> dict[str, Engine]:
    """Contender -> what decodes: AR, a chain, a tree of fixed size, a tree that the cost model cuts."""
    counts = tuple(sorted({1, NUM_SEATS // 2, NUM_SEATS}))
    sizes = CostEffort(max_budget=16, num_streams=counts, prefix_len=(32, 128), num_rounds=effort.num_rounds)
    options: dict[str, Any] = {"max_seq_len": MAX_SEQ_LEN, "max_streams": NUM_SEATS}
    return {
        "AR": Engine(model, budget=0, **options),
        "chain": Engine(model, drafter, drafter.depth, mode="chain", **options),
        "tree": Engine(model, drafter, BUDGET, **options),
        "tree auto": Engine(model, drafter, "auto", cost=calibrate(model, drafter, sizes), **options),
    }


def measure_streams(
    model: Model, drafter: AnyDrafter, prompts: Sequence[list[int]], effort: Effort, params: dict[str, Any]
) -> list[Measurement]:  # fmt: skip
    """By streams that run together: seconds of all texts, seconds per token of a text, and rows per step of a stream.

    The tokens must be those of AR decoding alone.
    """
    num_tokens = min(effort.num_tokens, NUM_TOKENS)
    alone = [Engine(model, max_seq_len=MAX_SEQ_LEN).generate_ar(p, num_tokens, stop_token_ids=()) for p in prompts]
    contenders, results = engines(model, drafter, effort), []
    params = {**params, "drafter": type(drafter).__name__, "texts": len(prompts), "tokens": len(prompts) * num_tokens}
    for count in effort.some(COUNTS):
        rounds: dict[str, list[Served]] = {name: [] for name in contenders}
        for _ in range(1 + min(effort.num_rounds, MAX_ROUNDS)):
            for name, engine in contenders.items():
                rounds[name].append(serve(engine, prompts, count, num_tokens))
        for name, (first, *timed) in rounds.items():
            texts = [handle.tokens for handle in first.handles]
            require(texts == [text.tokens for text in alone], "streams", "the tokens of each text alone")
            results += _measured(name, timed, {**params, "streams": count})
    return results + _shared(results)


def _shared(results: Sequence[Measurement]) -> list[Measurement]:
    """The same texts one at a time and as many as were measured together, of AR and of trees of fixed size."""
    found = []
    for contender in ("AR", "tree"):
        one, *_, most = [m for m in results if m.name == f"streams/{contender}"]
        params = {**most.params, "contender": contender}
        pair = {"one at a time": one, "together": most}
        found += [Measurement(f"streams_shared/{name}", m.samples, params) for name, m in pair.items()]
    return found


def _measured(name: str, timed: Sequence[Served], params: dict[str, Any]) -> list[Measurement]:
    rows = {**params, "tau": timed[-1].tau}
    return [
        Measurement(f"streams/{name}", [served.seconds for served in timed], params),
        Measurement(f"streams_token/{name}", [served.token_s for served in timed], params),
        Measurement(f"streams_rows/{name}", [served.nodes_per_step for served in timed], rows, "row"),
    ]


def streams(effort: Effort) -> list[Measurement]:
    """One to ten streams of tiny: AR, a chain and trees of prompt lookup; pieces of held-out code join and leave."""
    model = setting.model("tiny")
    prompts = library_prompts(model.tokenizer.encode, NUM_TEXTS, LENGTHS).prompts
    return measure_streams(model, NGram(), prompts, effort, {"model": "tiny", "dtype": "float32"})


def cuda_streams(lab: Lab, effort: Effort) -> list[Measurement]:
    """One to ten streams: tiny in FP32 with a SkipGram, and nano-k2 in BF16 with its trained DFlash drafter."""
    tiny, nano = setting.model("tiny", lab.device), setting.model("nano-k2", lab.device, torch.bfloat16)
    code = library_prompts(tiny.tokenizer.encode, NUM_TEXTS, LENGTHS).prompts
    written = own_prompts(nano.tokenizer.encode).prompts
    texts = [written[i % len(written)] for i in range(NUM_TEXTS)]
    runs: list[tuple[str, Model, AnyDrafter, list[list[int]]]] = [
        ("tiny", tiny, source_skip_gram(), code),
        ("nano-k2", nano, DFlash.load("nano-k2"), texts),
    ]
    results = []
    for name, model, drafter, prompts in runs:
        params = {"model": name, "dtype": dtype_name(model.dtype)}
        results += measure_streams(model, drafter, prompts, effort, params)
    return results
