"""Every group runs in its smallest form, under the names that records and chapters use, and checks before it times."""

from __future__ import annotations

import math

import pytest
import torch

from kdtree_nb import bench, ops
from kdtree_nb.bench import (
    BenchmarkError,
    Effort,
    budget_groups,
    engine_groups,
    machine_groups,
    op_groups,
    setting,
    stream_groups,
)

SMALLEST = Effort(num_rounds=1, num_tokens=16)
CONTENDERS = {
    "ar_step": {"numpy", "eager torch", "native"},
    "ar_step_bf16": {"eager torch", "native"},
    "ngram_ddtree": {"AR", "DDTree"},
    "ngram_ddtree_prompt": {"AR", "DDTree"},
    "ngram_chain": {"chain", "tree"},
    "models": {"AR", "DDTree"},
    "acceptance": {"SkipGram", "NGram"},
    "budget_sweep": {"AR", "chain", "chain auto", "tree 4", "tree 8", "tree auto"},
    "budget_sweep_tau": {"AR", "chain", "chain auto", "tree 4", "tree 8", "tree auto"},
    "expert_coverage": {"SkipGram", "random"},
    "streams": {"AR", "chain", "tree", "tree auto"},
    "streams_first": {"AR", "chain", "tree", "tree auto"},
    "streams_rows": {"AR", "chain", "tree", "tree auto"},
    "streams_shared": {"one at a time", "together"},
    "linear": {"numpy", "torch", "native"},
    "dense_block": {"eager torch", "native"},
    "tree_build": {"heapq", "native"},
    "verify_rows": {"17 single-row steps", "4 AR steps", "one 17-row verify"},
    "verify_sweep": {"native"},
    "verify_attn": {"torch masked", "native"},
    "accept_compact": {"python", "native"},
    "bandwidth": {"copy", "read", "AR step"},
    "matmul": {"torch"},
}


@pytest.mark.parametrize("name", bench.GROUPS)
def test_group(name, monkeypatch):
    monkeypatch.setattr(op_groups, "LINEAR_SHAPES", ((33, 65),))
    monkeypatch.setattr(op_groups, "SWEEP_ROWS", (1, 3))
    monkeypatch.setattr(budget_groups, "CPU_BUDGETS", (4, 8))
    monkeypatch.setattr(budget_groups, "COVERAGE_ROWS", (1, 5))
    monkeypatch.setattr(stream_groups, "COUNTS", (1, 3))
    monkeypatch.setattr(stream_groups, "NUM_TEXTS", 6)
    monkeypatch.setattr(machine_groups, "COPY_BYTES", 2**16)
    monkeypatch.setattr(machine_groups, "MATMUL_DIM", 64)
    found = bench.run_groups({name: bench.GROUPS[name]}, SMALLEST, show_progress=False)
    for group in {m.name.partition("/")[0] for m in found}:
        assert {m.name.partition("/")[2] for m in found if m.name.startswith(f"{group}/")} == CONTENDERS[group]
    assert len({(m.name, str(m.params)) for m in found}) == len(found)  # params tell equal names apart
    assert all(len(m.samples) == 1 or m.unit == "expert" for m in found)
    assert all(m.samples and all(math.isfinite(s) and s > 0 for s in m.samples) for m in found)
    assert name in {m.name.partition("/")[0] for m in found}


def test_names_without_params_are_unique_where_chapters_ask_without():
    for name in ("ar_step", "ngram_ddtree", "ngram_chain"):
        names = [m.name for m in bench.GROUPS[name](SMALLEST) if m.name.startswith(f"{name}/")]
        assert len(names) == len(set(names)) >= 2


def test_a_sum_over_prompts_adds_up_round_by_round():
    found = engine_groups.ngram_ddtree(Effort(num_rounds=2, num_tokens=8))
    for contender in ("AR", "DDTree"):
        total = next(m for m in found if m.name == f"ngram_ddtree/{contender}")
        single = [m for m in found if m.name == f"ngram_ddtree_prompt/{contender}"]
        assert len(single) == len(setting.prompts("repetitive")) >= 3
        assert list(total.samples) == [sum(m.samples[r] for m in single) for r in range(2)]


def wrong(function):
    def spoiled(*args, **kwargs):
        result = function(*args, **kwargs)
        first = result[0] if isinstance(result, tuple) else result
        first.view(-1)[0] += 1
        return result

    return spoiled


@pytest.mark.parametrize(("operation", "group"), [("linear", "linear"), ("verify_attn", "verify_attn"),
                                                  ("tree_accept", "accept_compact")])  # fmt: skip
def test_a_wrong_operation_is_not_timed(monkeypatch, operation, group):
    setting.scene(setting.model("tiny"), 16)
    if group == "accept_compact":
        monkeypatch.setattr(op_groups, "accept_python", lambda tree, stream, target: ([1], 0))
    else:
        monkeypatch.setattr(ops, operation, wrong(getattr(ops, operation)))
    with pytest.raises(BenchmarkError, match=f"bench: {group}: expected all contenders to agree"):
        bench.GROUPS[group](SMALLEST)


def test_weight_bytes_of_an_ar_step():
    model = setting.model("tiny")
    c = model.config
    attention = c.hidden_size * (c.num_attention_heads * (c.q_head_dim + c.v_head_dim) + c.latent_dim)
    attention += c.num_attention_heads * c.kv_lora_rank * (c.qk_nope_head_dim + c.v_head_dim)
    norms = 2 * c.hidden_size + c.kv_lora_rank
    expert = 3 * c.hidden_size * c.moe_intermediate_size
    moe = (c.num_experts_per_tok + 1) * expert + c.hidden_size * 16  # the router's 8 rows are padded to 16
    dense = 3 * c.hidden_size * c.intermediate_size
    head = c.hidden_size * (c.vocab_size + 2)  # with the last norm and one embedding row
    num_layers, num_dense = c.num_hidden_layers, c.first_k_dense_replace
    want = num_layers * (attention + norms) + num_dense * dense + (num_layers - num_dense) * moe + head
    assert machine_groups.ar_weight_bytes(model) == 4 * want
    assert machine_groups.ar_weight_bytes(setting.model("tiny", dtype=torch.bfloat16)) == 2 * want
