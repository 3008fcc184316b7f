"""Benchmarks of whole generations and of AR steps of tiny on a GPU."""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import inspect
import json
import textwrap
from pathlib import Path

import torch

from kdtree_nb.bench import setting
from kdtree_nb.bench.eager_graph import EagerGraphModel
from kdtree_nb.bench.eager_torch import EagerModel
from kdtree_nb.bench.engine_groups import BUDGET, NUM_SLOTS, eager_steps, repetitive_runs, tiny_weights
from kdtree_nb.bench.lab import Lab, dtype_name
from kdtree_nb.bench.runner import Effort, Measurement, Sample, clock, compete, require
from kdtree_nb.drafters import NGram, SkipGram
from kdtree_nb.speculate import Engine

PROMPT = list(b"@")
"""tiny is sure of every token that it writes behind this one: FP32 sums in any order give the same text."""

NO_GRAPHS = "native without graphs"
DTYPES = (torch.float32, torch.bfloat16)
MAX_ROUNDS = 7
"""Whole generations take seconds a round."""


def ar_step(lab: Lab, effort: Effort) -> list[Measurement]:
    """One token of tiny in FP32 and BF16, by the clock: eager torch, the same model in a CUDA graph, and the engine.

    The engine with a CUDA graph per step, as it is by default, and without.
    """
    (config, weights), effort = tiny_weights(), _shortened(effort)
    num_steps, results = effort.num_tokens // 2, []
    for dtype in DTYPES:
        texts: dict[str, list[int]] = {}
        model = setting.model("tiny", lab.device, dtype)
        eager = EagerModel(config, weights, NUM_SLOTS, dtype, lab.device)
        graph = EagerGraphModel(config, weights, NUM_SLOTS, dtype, lab.device, lab.capture)
        contenders = {
            "eager torch": eager_steps(eager, PROMPT, num_steps, texts),
            "torch graph": eager_steps(graph, PROMPT, num_steps, texts, "torch graph"),
            "native": _steps(Engine(model), num_steps, texts, "native"),
            NO_GRAPHS: _steps(Engine(model, use_graphs=False), num_steps, texts, NO_GRAPHS),
        }
        group = "ar_step" if dtype == torch.float32 else "ar_step_bf16"
        params = {"model": "tiny", "dtype": dtype_name(dtype), "prompt_tokens": len(PROMPT)}
        results += compete(group, contenders, effort.num_rounds, params)
        require(texts["native"] == texts[NO_GRAPHS], group, "the tokens with graphs and without")
        if dtype == torch.float32:  # in BF16 the peers round elsewhere, so that their text may differ
            require(all(text == texts["native"] for text in texts.values()), group, "the tokens")
    return results


def _steps(engine: Engine, num_steps: int, texts: dict[str, list[int]], name: str) -> Sample:
    """Seconds of a step: a whole call over the number of its steps; a prompt of one token needs no prefill. Nothing
    watches the steps, which would keep the engine from launching ahead."""

    def generate() -> None:
        texts[name] = engine.generate_ar(PROMPT, num_steps, stop_token_ids=()).tokens

    return lambda: clock(generate) / num_steps


def ngram_ddtree(lab: Lab, effort: Effort) -> list[Measurement]:
    """AR and DDTree on repetitive real text, whole calls with prefill, in FP32 and BF16, by the clock. DDTree with an
    NGram on the host, and with a SkipGram of the standard library's source on the device; with and without graphs."""
    skip_gram, results = SkipGram(_source_text(), 256), []
    for dtype in DTYPES:
        model = setting.model("tiny", lab.device, dtype)
        engine, plain = (Engine(model, NGram(), BUDGET, use_graphs=graphs) for graphs in (None, False))
        runs = {
            "AR": engine.generate_ar,
            "DDTree": engine.generate_ddtree,
            "DDTree SkipGram": Engine(model, skip_gram, BUDGET).generate_ddtree,
            "AR without graphs": plain.generate_ar,
            "DDTree without graphs": plain.generate_ddtree,
        }
        group = "ngram_ddtree" if dtype == torch.float32 else "ngram_ddtree_bf16"
        results += repetitive_runs(group, runs, _shortened(effort), dtype=dtype_name(dtype))
    return results


def _source_text() -> list[int]:
    """Bytes of some modules of the standard library."""
    modules = (argparse, dataclasses, heapq, inspect, json, textwrap)
    return list(b"".join(Path(module.__file__).read_bytes() for module in modules))


def _shortened(effort: Effort) -> Effort:
    return dataclasses.replace(
        effort, num_rounds=min(effort.num_rounds, MAX_ROUNDS), num_tokens=min(effort.num_tokens, 128)
    )
