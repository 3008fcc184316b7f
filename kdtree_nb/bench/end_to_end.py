"""tiny and nano-k2 end to end: whole texts by AR and by DDTree, prefill included, with each model's own drafter."""

from __future__ import annotations

import dataclasses

import torch

from kdtree_nb.bench.engine_groups import BUDGET, all_prompts
from kdtree_nb.bench.lab import Lab, dtype_name
from kdtree_nb.bench.prompt_sets import own_prompts
from kdtree_nb.bench.runner import Effort, Measurement
from kdtree_nb.drafters import DFlash, NGram
from kdtree_nb.model import load_model
from kdtree_nb.model.checkpoint import NANO
from kdtree_nb.speculate import Engine

DTYPES = (torch.float32, torch.bfloat16)
MAX_ROUNDS = 7
"""Whole texts take seconds a round."""

MODELS = (("tiny", "ngram", "repetitive"), (NANO, "DFlash", "code"))
"""Model, drafter and kind of this project's prompts."""


def end_to_end(lab: Lab, effort: Effort) -> list[Measurement]:
    """`end_to_end/AR` and `…/DDTree`: wall seconds of all texts of a model, which have `tokens` new tokens together.
    Both give the same ones, or it is an error."""
    results, effort = [], dataclasses.replace(effort, num_rounds=min(effort.num_rounds, MAX_ROUNDS))
    for name, drafter_name, kind in MODELS:
        for dtype in DTYPES:
            model = load_model(name, lab.device, dtype)
            drafter = NGram() if drafter_name == "ngram" else DFlash.load(name)
            engine = Engine(model, drafter, BUDGET)
            prompts = own_prompts(model.tokenizer.encode, kind).prompts
            runs = {"AR": engine.generate_ar, "DDTree": engine.generate_ddtree}
            params = {"model": name, "drafter": drafter_name, "budget": BUDGET, "dtype": dtype_name(dtype),
                      "tokens": effort.num_tokens * len(prompts)}  # fmt: skip
            results += all_prompts("end_to_end", runs, prompts, effort, params)
    return results
