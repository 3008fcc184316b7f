"""Benchmarks of one to ten submitted streams: seconds for a token, and to the first of a text, by how many run.

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
    """Texts that were decoded several at a time, as long as that many ran: until the last one was submitted.

    seconds:    until then
    num_tokens: emitted, by all streams together
    num_steps:  that streams took part in, those of each counted
    num_rows:   of all streams in these steps
    handles:    one per text, in order; by now all have finished
    """

    seconds: float
    num_tokens: int
    num_steps: int
    num_rows: int
    handles: list[Handle]

    @property
    def token_s(self) -> float:
        """Seconds for a token, whichever stream gets it."""
        return self.seconds / self.num_tokens

    @property
    def first_s(self) -> float:
        """Seconds from a seat in the batch to the first token, the mean over the texts."""
        times = [handle.latency for handle in self.handles]
        return statistics.fmean(t.token_s[0] - t.seat_s for t in times if t.seat_s is not None)

    @property
    def rows(self) -> float:
        """Rows of a stream in a step, the mean."""
        return self.num_rows / self.num_steps

    @property
    def tau(self) -> float:
        """Tokens per target forward of a stream, the mean over its steps."""
        return self.num_tokens / self.num_steps


def serve(engine: Engine, prompts: Sequence[list[int]], num_streams: int, num_tokens: int) -> Served:
    """Decode all prompts, `num_streams` at a time. Raises ValueError where that many never run for long."""
    if len(prompts) < 2 * num_streams:
        raise ValueError(f"serve: expected at least {2 * num_streams} prompts for {num_streams}, got {len(prompts)}")
    start, handles = time.perf_counter(), []
    while len(handles) < len(prompts):
        num_free = num_streams - sum(not handle.is_finished for handle in handles)
        for prompt in prompts[len(handles) : len(handles) + num_free]:
            handles.append(engine.submit(prompt, num_tokens, stop_token_ids=()))
        if len(handles) < len(prompts):
            engine.step()
    seconds = time.perf_counter() - start
    rows = [count for handle in handles for count in handle.stats.nodes_per_step]
    done = sum(handle.num_tokens for handle in handles)
    engine.run()
    return Served(seconds, done, len(rows), sum(rows), handles)


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
    """By streams that run together: seconds for a token, whichever stream gets it, seconds from a seat to a stream's
    first token, and rows of a stream in a step.

    The tokens must be those of AR decoding alone.
    """
    num_tokens = min(effort.num_tokens, NUM_TOKENS)
    alone = [Engine(model, max_seq_len=MAX_SEQ_LEN).generate_ar(p, num_tokens, stop_token_ids=()) for p in prompts]
    contenders, results = engines(model, drafter, effort), []
    params = {**params, "drafter": type(drafter).__name__, "texts": len(prompts), "num_tokens": num_tokens}
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
    """Seconds for a token, one text at a time and as many as were measured together, of AR and of fixed trees."""
    found = []
    for contender in ("AR", "tree"):
        one, *_, most = [m for m in results if m.name == f"streams/{contender}"]
        params = {**most.params, "contender": contender}
        pair = {"one at a time": one, "together": most}
        found += [Measurement(f"streams_shared/{name}", m.samples, params) for name, m in pair.items()]
    return found


def _measured(name: str, timed: Sequence[Served], params: dict[str, Any]) -> list[Measurement]:
    return [
        Measurement(f"streams/{name}", [served.token_s for served in timed], params),
        Measurement(f"streams_first/{name}", [served.first_s for served in timed], params),
        Measurement(f"streams_rows/{name}", [served.rows for served in timed], {**params, "tau": timed[-1].tau}, "row"),
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
