"""Programs for `parallel.run`: what a rank does, in functions that its process can import."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed

from kdtree_nb.drafters import NGram
from kdtree_nb.model import load_model
from kdtree_nb.native import ops
from kdtree_nb.parallel.tensor_parallel import TensorParallel
from kdtree_nb.speculate import Engine


def decode(ranks: TensorParallel, name: str, prompt: Sequence[int], num_tokens: int, budget: int) -> dict[str, Any]:
    """Greedy text of a model, AR and with trees: tokens, logits, and the bytes of weights that this rank holds."""
    model = load_model(name, ranks.device, ranks=ranks)
    engine = Engine(model, NGram(), budget)
    ar = engine.generate_ar(prompt, num_tokens, return_logits=True)
    ddtree = engine.generate_ddtree(prompt, num_tokens, return_logits=True)
    held = {t.data_ptr(): t.numel() * t.element_size() for t in model.tensors()}
    return {"ar": (ar.tokens, ar.logits), "ddtree": (ddtree.tokens, ddtree.logits), "bytes": sum(held.values())}


def time_exchanges(
    ranks: TensorParallel, num_rows: Sequence[int], dim: int, num_rounds: int = 15
) -> dict[int, dict[str, list[float]]]:
    """Seconds of one sum over ranks on the CPU, by rows and way, in turns: torch's all-reduce of f32 [T, D], whose
    order of additions is its own, and the ranks' exchange with the sum on the tree."""
    found = {}
    for count in num_rows:
        part, residual = torch.ones(count, dim), torch.zeros(count, dim)
        ways = {
            "all-reduce": lambda part=part: distributed.all_reduce(part.clone()),
            "exchange and tree": lambda part=part, residual=residual: ops.add_partials(
                ranks.group.all_gather(part), residual.dtype, residual
            ),
        }
        found[count] = {name: [] for name in ways}
        for call in ways.values():
            call()
        for _ in range(num_rounds):
            for name, call in ways.items():
                start = time.perf_counter()
                call()
                found[count][name].append(time.perf_counter() - start)
    return found
