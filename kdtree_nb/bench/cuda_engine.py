"""Benchmarks of whole generations and of AR steps of tiny on a GPU."""

from __future__ import annotations

import dataclasses

import torch

from kdtree_nb.bench import setting
from kdtree_nb.bench.eager_graph import EagerGraphModel
from kdtree_nb.bench.eager_torch import EagerModel
from kdtree_nb.bench.engine_groups import NUM_SLOTS, eager_steps, engine_steps, ngram_runs, tiny_weights
from kdtree_nb.bench.lab import Lab, dtype_name
from kdtree_nb.bench.runner import Effort, Measurement, compete, require
from kdtree_nb.goldens import load_goldens
from kdtree_nb.speculate import Engine

DTYPES = (torch.float32, torch.bfloat16)
MAX_ROUNDS = 9
"""Whole generations take seconds a round."""


def ar_step(lab: Lab, effort: Effort) -> list[Measurement]:
    """One token of tiny in FP32 and BF16: eager torch, the same model in a CUDA graph, and the engine; wall time."""
    golden, (config, weights), effort = load_goldens("tiny")[0], tiny_weights(), _shortened(effort)
    prompt, num_steps = golden.prompt, effort.num_tokens // 2
    results = []
    for dtype in DTYPES:
        texts: dict[str, list[int]] = {}
        eager = EagerModel(config, weights, NUM_SLOTS, dtype, lab.device)
        graph = EagerGraphModel(config, weights, NUM_SLOTS, dtype, lab.device, lab.capture)
        engine = Engine(setting.model("tiny", lab.device, dtype))
        contenders = {
            "eager torch": eager_steps(eager, prompt, num_steps, texts),
            "torch graph": eager_steps(graph, prompt, num_steps, texts, "torch graph"),
            "native": engine_steps(engine, prompt, num_steps, texts),
        }
        group = "ar_step" if dtype == torch.float32 else "ar_step_bf16"
        params = {"model": "tiny", "dtype": dtype_name(dtype), "prompt_tokens": len(prompt)}
        results += compete(group, contenders, effort.num_rounds, params)
        if dtype == torch.float32:  # in BF16 the peers round elsewhere, so that their text may differ
            require(all(text == golden.tokens[:num_steps] for text in texts.values()), group, "the golden tokens")
    return results


def ngram_ddtree(lab: Lab, effort: Effort) -> list[Measurement]:
    """NGram DDTree against AR on repetitive real text, whole calls with prefill, in FP32 and BF16; wall time."""
    results = []
    for dtype in DTYPES:
        group = "ngram_ddtree" if dtype == torch.float32 else "ngram_ddtree_bf16"
        model = setting.model("tiny", lab.device, dtype)
        results += ngram_runs(_shortened(effort), model, group, dtype=dtype_name(dtype))
    return results


def _shortened(effort: Effort) -> Effort:
    return dataclasses.replace(
        effort, num_rounds=min(effort.num_rounds, MAX_ROUNDS), num_tokens=min(effort.num_tokens, 128)
    )
