"""The groups of a GPU in their smallest form: on a CPU with the clock in place of graph replays, on a GPU for real."""

from __future__ import annotations

import math

import pytest
import torch

from kdtree_nb import bench, ops
from kdtree_nb.bench import (
    BenchmarkError,
    Effort,
    Lab,
    cuda_attention,
    cuda_experts,
    cuda_invariance,
    cuda_linear,
    cuda_sampling,
    cuda_trees,
    lab,
    linear_shapes,
    stream_groups,
)
from kdtree_nb.bench.runner import once

SMALLEST = Effort(num_rounds=2, num_tokens=32, num_cases=30)
RUNS = {"AR", "DDTree", "DDTree SkipGram", "AR without graphs", "DDTree without graphs"}
CONTENDERS = {
    "bandwidth": {"copy"},
    "matmul": {"torch"},
    "linear": {"torch", "native"},
    "invariance_cost": {"invariant", "best shape", "best cuBLAS"},
    "verify_attn_sweep": {"torch masked", "torch lean", "native"},
    "moe_experts": {"torch grouped", "torch indexed", "native"},
    "draft_topk": {"torch", "native"},
    "tree_build_sweep": {"heapq", "native"},
    "draft_tree": {"native"},
    "bookkeeping": {"published", "native"},
    "bookkeeping_part": {"draft_topk", "tree_rows", "tree_accept", "cache_compact"},
    "sample": {"torch", "native", "argmax"},
    "sampling_cost": {"greedy", "sampling"},
    "ar_step": {"eager torch", "torch graph", "native", "native without graphs"},
    "ar_step_bf16": {"eager torch", "torch graph", "native", "native without graphs"},
    "ngram_ddtree": RUNS,
    "ngram_ddtree_prompt": RUNS,
    "ngram_ddtree_bf16": RUNS,
    "ngram_ddtree_bf16_prompt": RUNS,
    "streams": {"AR", "chain", "tree", "tree auto"},
    "streams_first": {"AR", "chain", "tree", "tree auto"},
    "streams_rows": {"AR", "chain", "tree", "tree auto"},
    "streams_shared": {"one at a time", "together"},
    "invariance": {"native", "torch"},
    "invariance_total": {"native"},
    "invariance_tokens": {"native", "torch"},
}
SIZES = {
    lab: {"_COPY_BYTES": 2**16, "_MATMUL_DIMS": {torch.bfloat16: 32, torch.float32: 32}},
    cuda_linear: {"SHAPES": ((64, 48),), "SHAPES_F32": ((65, 33),), "ROWS": (1, 17), "ROWS_F32": (3,),
                  "FREE_ROWS": (1, 17), "ROTATED_BYTES": 20_000},
    cuda_experts: {"DIM": 64, "WIDTH": 32, "NUM_EXPERTS": 16, "ROWS": (1, 5), "NUM_INPUTS": 2},
    cuda_attention: {"HEADS": (2,), "PREFIX_LENS": (64, 100), "NODES": (1, 9), "ROTATED_BYTES": 200_000},
    cuda_sampling: {"VOCAB_SIZE": 300, "ROWS": (1, 5), "MODES": ((0, 1.0), (20, 0.9)), "ROTATED_BYTES": 5000},
    cuda_trees: {"VOCAB_SIZE": 500, "CANDIDATES": (16, 40), "BUDGETS": (8, 20), "STREAMS": (1, 2), "NUM_COPIES": 2,
                 "NUM_LAYERS": 3, "WIDTH": 8},
    stream_groups: {"COUNTS": (1, 3), "NUM_TEXTS": 6, "NUM_SEATS": 3},
    cuda_invariance: {"LONGEST_TEXT": 150, "LONGEST_PREFIX": 300, "HEADS": (2,), "LINEAR_SHAPES": ((65, 33),)},
}  # fmt: skip


@pytest.fixture
def small_lab(device, monkeypatch) -> Lab:
    for module, sizes in SIZES.items():
        for name, size in sizes.items():
            monkeypatch.setattr(module, name, size)
    if device.type == "cuda":
        return Lab(device, num_rounds=2)
    shape = linear_shapes.Shape(0, "only", 16, 16, 1)
    monkeypatch.setattr(cuda_linear, "shapes", lambda dtype: [shape])
    monkeypatch.setattr(cuda_linear, "linear_with", lambda x, packed, out, shape: out.copy_(ops.linear(x, packed)))
    return Lab(device, lambda calls: once(lambda: [call() for call in calls]), once, lambda call: call, num_rounds=2)


@pytest.mark.parametrize("name", bench.cuda_groups(Lab("cpu")))
def test_group(small_lab, name):
    found = bench.run_groups({name: bench.cuda_groups(small_lab)[name]}, SMALLEST, show_progress=False)
    groups = {m.name.partition("/")[0] for m in found}
    assert name in groups
    for group in groups:
        assert {m.name.partition("/")[2] for m in found if m.name.startswith(f"{group}/")} == CONTENDERS[group]
    assert len({(m.name, str(m.params)) for m in found}) == len(found)  # params tell equal names apart
    assert all(m.samples and all(math.isfinite(s) and s > 0 for s in m.samples) for m in found)
    for m in found:
        if "floor_s" in m.params:
            assert m.params["bytes"] > 0 and m.params["flops"] > 0 and m.params["floor_s"] > 0
    judged = bench.judge(bench.targets_of("cuda"), found)
    assert all(math.isfinite(v.got) and 0 <= v.num_met <= v.num_cells for v in judged)
    assert bench.markdown_table(judged).count("\n") == 2 + len(judged)


def test_floors(small_lab):
    small_lab.__dict__["bandwidth"] = bench.Measurement("bandwidth/copy", [1e12], {}, "byte/s")
    small_lab.__dict__["matmuls"] = {torch.bfloat16: bench.Measurement("matmul/torch", [1e14], {}, "flop/s")}
    assert small_lab.floor_s(1e9, 1e10, torch.bfloat16) == pytest.approx(1e-3)
    assert small_lab.floor_s(1e6, 1e12, torch.bfloat16) == pytest.approx(1e-2)
    work = small_lab.work(1e9, 1e10, torch.bfloat16)
    assert work == {"dtype": "bfloat16", "bytes": 10**9, "flops": 10**10, "floor_s": pytest.approx(1e-3)}


def test_nothing_of_ours_changes_and_all_cases_are_counted(small_lab):
    found = cuda_invariance.invariance(small_lab, SMALLEST)
    native = [m for m in found if m.name == "invariance/native"]
    assert all(m.params["changed_rows"] == 0 and m.params["rows"] == m.samples[0] > 0 for m in native)
    assert sum(m.params["cases"] for m in native) == 2 * (2 * 5 + 3 + 2)


def spoiled(function):
    def spoil(x, *args, **kwargs):
        out = function(x, *args, **kwargs)
        if len(out) > 1:
            out.view(len(out), -1)[0, 0] += 1
        return out

    return spoil


@pytest.mark.parametrize(("operation", "what"), [("linear", "linear 65 to 33"), ("verify_attn", "attention"),
                                                 ("embed", "forward of tiny")])  # fmt: skip
def test_a_row_that_depends_on_its_company_is_counted(small_lab, monkeypatch, operation, what):
    monkeypatch.setattr(ops, operation, spoiled(getattr(ops, operation)))
    found = cuda_invariance.invariance(small_lab, SMALLEST)
    counted = [m for m in found if m.name == "invariance/native" and m.params["what"] == what]
    assert len(counted) == 2 and all(0 < m.params["changed_rows"] <= m.params["rows"] for m in counted)


@pytest.mark.parametrize(("operation", "group"), [("linear", "linear"), ("verify_attn", "verify_attn_sweep"),
                                                  ("moe_experts", "moe_experts")])  # fmt: skip
def test_a_wrong_operation_is_not_timed(small_lab, monkeypatch, operation, group):
    right = getattr(ops, operation)
    monkeypatch.setattr(ops, operation, lambda *args: right(*args) * 2)
    with pytest.raises(BenchmarkError, match=f"bench: {group}: expected all contenders to agree"):
        bench.cuda_groups(small_lab)[group](SMALLEST)
