"""Benchmarks of the size of the tree: what is accepted by budget, tokens per second by budget, experts by rows."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import heapq
import inspect
import json
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kdtree_nb.bench import acceptance, setting
from kdtree_nb.bench.acceptance import CHAIN, Budget
from kdtree_nb.bench.coverage import coverage, random_coverage
from kdtree_nb.bench.prompt_sets import library_prompts, own_prompts
from kdtree_nb.bench.runner import Effort, Measurement, compete, require
from kdtree_nb.drafters import AnyDrafter, NGram, SkipGram
from kdtree_nb.model import Model
from kdtree_nb.speculate import Engine, Generation, calibrate
from kdtree_nb.speculate.measure_cost import Effort as CostEffort
from kdtree_nb.speculate.metrics import decode_s, summarize

AUTO = "auto"
CPU_BUDGETS = (4, 8, 16, 32, 64)
COVERAGE_ROWS = (1, 2, 3, 5, 9, 17, 33, 65)
NUM_TEXTS = 12
MAX_ROUNDS = 5
"""A round decodes every text with every budget."""

Run = Callable[..., Generation]


@functools.lru_cache(maxsize=1)
def source_skip_gram() -> SkipGram:
    """A SkipGram of some modules of the standard library, none of them held out when tiny was trained."""
    modules = (argparse, dataclasses, heapq, inspect, json, textwrap)
    return SkipGram(list(b"".join(Path(module.__file__).read_bytes() for module in modules)), 256)


def prompt_sets(model: Model, num_texts: int = NUM_TEXTS) -> dict[str, list[list[int]]]:
    """Held-out code, and this project's repetitive prompts."""
    encode = model.tokenizer.encode
    return {
        "held-out code": library_prompts(encode, num_texts).prompts,
        "repetitive": own_prompts(encode, "repetitive").prompts,
    }


def acceptance_by_budget(effort: Effort) -> list[Measurement]:
    """Tokens per target forward of tiny by budget, with a SkipGram and with prompt lookup, on two sets of prompts."""
    model, budgets, results = setting.model("tiny"), CPU_BUDGETS, []
    for name, prompts in prompt_sets(model, effort.num_rounds).items():
        texts = acceptance.decode_texts(model, prompts, effort.num_tokens)
        for drafter in (source_skip_gram(), NGram()):
            found = acceptance.measure_acceptance(model, drafter, prompts, texts, budgets)
            acceptance.check(model, drafter, prompts, found, CHAIN)
            acceptance.check(model, drafter, prompts, found, budgets[-1])
            params = {"model": "tiny", "set": name, "num_texts": len(texts), "num_tokens": effort.num_tokens}
            results += accepted(f"acceptance/{type(drafter).__name__}", found.report(), params)
    return results


def accepted(name: str, report: Sequence[dict[str, Any]], params: dict[str, Any]) -> list[Measurement]:
    """A measurement of tau for each budget of `Acceptance.report`, with its other figures among the params."""
    results = []
    for entry in report:
        figures = {field: value for field, value in entry.items() if field != "tau"}
        results.append(Measurement(name, [entry["tau"]], {**params, **figures}, "token"))
    return results


def expert_coverage(effort: Effort) -> list[Measurement]:
    """Distinct experts of tiny that the rows of a SkipGram's trees choose, the mean over its layers, and at random."""
    model = setting.model("tiny")
    prompts = prompt_sets(model, min(effort.num_rounds, NUM_TEXTS))["held-out code"]
    texts = acceptance.decode_texts(model, prompts, effort.num_tokens)
    return covered("expert_coverage", model, source_skip_gram(), prompts, texts, {"model": "tiny"})


def covered(
    group: str, model: Model, drafter: AnyDrafter, prompts: Sequence[list[int]], texts: Sequence[list[int]],
    params: dict[str, Any],
) -> list[Measurement]:  # fmt: skip
    """By rows of a step: the distinct experts of each layer of experts, and what random choices would give."""
    num_experts, top_k = model.config.n_routed_experts, model.config.num_experts_per_tok
    results = []
    for rows, found in coverage(model, drafter, prompts, texts, COVERAGE_ROWS).items():
        at = {**params, "rows": rows, "num_experts": num_experts, "top_k": top_k}
        results.append(Measurement(f"{group}/{type(drafter).__name__}", found, at, "expert"))
        results.append(Measurement(f"{group}/random", [random_coverage(num_experts, top_k, rows)], at, "expert"))
    return results


def budget_sweep(effort: Effort) -> list[Measurement]:
    """Whole calls of tiny by the clock: AR, a chain, trees by budget, and the budget that the cost model chooses."""
    model, results = setting.model("tiny"), []
    drafters: list[AnyDrafter] = [source_skip_gram(), NGram()]
    for drafter in drafters:
        for name, prompts in prompt_sets(model, min(effort.num_rounds, NUM_TEXTS)).items():
            params = {"model": "tiny", "drafter": type(drafter).__name__, "set": name}
            results += sweep("budget_sweep", model, drafter, prompts, CPU_BUDGETS, effort, params)
    return results


def sweep(
    group: str, model: Model, drafter: AnyDrafter, prompts: Sequence[list[int]], budgets: Sequence[int],
    effort: Effort, params: dict[str, Any],
) -> list[Measurement]:  # fmt: skip
    """Seconds of decoding all prompts, one after the other and without their prefill, by contender; in `<group>_tau`
    the tokens per step.

    Contenders: AR, chain, chain auto, tree <budget>, tree auto. Their texts must agree.
    """
    runs = contenders(model, drafter, budgets, effort)
    calls = {name: functools.partial(_decode, run, prompts, effort.num_tokens) for name, run in runs.items()}
    texts = {name: call() for name, call in calls.items()}
    ar = [text.tokens for text in texts["AR"]]
    require(all([t.tokens for t in found] == ar for found in texts.values()), group, "the tokens")
    params = {**params, "num_texts": len(prompts), "num_tokens": effort.num_tokens}
    samples = {name: functools.partial(_seconds, call) for name, call in calls.items()}
    results = compete(group, samples, min(effort.num_rounds, MAX_ROUNDS), params)
    for name, found in texts.items():
        figures = summarize(found)
        more = {**params, "nodes_per_step": figures.nodes_per_step, "tau_mean": figures.tau_mean}
        results.append(Measurement(f"{group}_tau/{name}", [figures.tau], more, "token"))
    return results


def contenders(model: Model, drafter: AnyDrafter, budgets: Sequence[int], effort: Effort) -> dict[str, Run]:
    """Ways to decode with `drafter`, by name."""
    cost = calibrate(
        model, drafter, CostEffort(max_budget=max(budgets), num_streams=(1,), num_rounds=effort.num_rounds)
    )
    wanted: dict[str, tuple[Budget, str]] = {"chain": (drafter.depth, "chain"), "chain auto": (AUTO, "chain")}
    wanted |= {f"tree {budget}": (budget, "tree") for budget in budgets} | {"tree auto": (AUTO, "tree")}
    engines = {name: Engine(model, drafter, budget, mode=mode, cost=cost) for name, (budget, mode) in wanted.items()}
    return {"AR": Engine(model).generate_ar} | {name: engine.generate_ddtree for name, engine in engines.items()}


def _decode(run: Run, prompts: Sequence[list[int]], num_tokens: int) -> list[Generation]:
    return [run(prompt, num_tokens, stop_token_ids=()) for prompt in prompts]


def _seconds(call: Callable[[], list[Generation]]) -> float:
    """Of all texts, without the prefill."""
    return sum(sum(decode_s(generation).values()) for generation in call())
