"""The benchmarks of a GPU by name."""

from __future__ import annotations

import functools
from collections.abc import Callable

from kdtree_nb.bench import (
    cuda_attention,
    cuda_engine,
    cuda_experts,
    cuda_invariance,
    cuda_linear,
    cuda_sampling,
    cuda_trees,
    lab,
    stream_groups,
)
from kdtree_nb.bench.runner import Effort, Group, Measurement

FUNCTIONS: dict[str, Callable[[lab.Lab, Effort], list[Measurement]]] = {
    "bandwidth": lab.bandwidth,
    "matmul": lab.matmul,
    "linear": cuda_linear.linear,
    "invariance_cost": cuda_linear.invariance_cost,
    "verify_attn_sweep": cuda_attention.verify_attn_sweep,
    "moe_experts": cuda_experts.moe_experts,
    "draft_topk": cuda_trees.draft_topk,
    "tree_build_sweep": cuda_trees.tree_build_sweep,
    "draft_tree": cuda_trees.draft_tree,
    "bookkeeping": cuda_trees.bookkeeping,
    "sample": cuda_sampling.sample,
    "sampling_cost": cuda_sampling.sampling_cost,
    "ar_step": cuda_engine.ar_step,
    "ngram_ddtree": cuda_engine.ngram_ddtree,
    "streams": stream_groups.cuda_streams,
    "invariance": cuda_invariance.invariance,
    "invariance_tokens": cuda_invariance.invariance_tokens,
}


def cuda_groups(where: lab.Lab) -> dict[str, Group]:
    """The groups, to be run on the device of `where`."""
    return {name: functools.update_wrapper(functools.partial(f, where), f) for name, f in FUNCTIONS.items()}
