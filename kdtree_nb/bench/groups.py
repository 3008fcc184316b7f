"""The benchmarks by name. Contenders of a group are the names after the slash in a record: `<group>/<contender>`."""

from __future__ import annotations

from kdtree_nb.bench import budget_groups, engine_groups, machine_groups, op_groups, stream_groups
from kdtree_nb.bench.runner import Group

GROUPS: dict[str, Group] = {
    "ar_step": engine_groups.ar_step,
    "ngram_ddtree": engine_groups.ngram_ddtree,
    "ngram_chain": engine_groups.ngram_chain,
    "models": engine_groups.models,
    "acceptance": budget_groups.acceptance_by_budget,
    "budget_sweep": budget_groups.budget_sweep,
    "expert_coverage": budget_groups.expert_coverage,
    "streams": stream_groups.streams,
    "linear": op_groups.linear,
    "dense_block": op_groups.dense_block,
    "tree_build": op_groups.tree_build,
    "verify_rows": op_groups.verify_rows,
    "verify_sweep": op_groups.verify_sweep,
    "verify_attn": op_groups.verify_attn,
    "accept_compact": op_groups.accept_compact,
    "bandwidth": machine_groups.bandwidth,
    "matmul": machine_groups.matmul,
}
