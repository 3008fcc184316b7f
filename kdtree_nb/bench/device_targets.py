"""The targets of each kind of device. data/benchmarks/README.md says which of them the committed records reach."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kdtree_nb.bench.draft_targets import DRAFT_TARGETS
from kdtree_nb.bench.published import PUBLISHED_S
from kdtree_nb.bench.targets import Cell, Figure, Target, microseconds, param, teraflops, times_faster, times_floor

_CPU = (
    Target("cpu", "ar_step", "an AR step is at least 3x faster than the numpy reference",
           times_faster("native", "numpy"), 3.0),
    Target("cpu", "ar_step", "an AR step is at least 3x faster than eager torch",
           times_faster("native", "eager torch"), 3.0),
    Target("cpu", "verify_rows", "a 17-row verify costs at most 4 AR steps",
           times_faster("one 17-row verify", "4 AR steps"), 1.0),
    Target("cpu", "tree_build", "tree_build is at least 20x faster than Python's heapq",
           times_faster("native", "heapq"), 20.0, open="19 to 20.5 times from run to run"),
    Target("cpu", "ngram_ddtree", "NGram DDTree is faster than AR on repetitive text",
           times_faster("DDTree", "AR"), 1.0),
)  # fmt: skip


def _query_rows(params: Mapping[str, Any]) -> int:
    return params["heads"] * params["rows"]


def _few(prefix_len: int, params: Mapping[str, Any]) -> bool:
    return params["prefix_len"] == prefix_len and _query_rows(params) <= 64


def _attention(
    claim: str, figure: Figure, bound: float, at_least: bool, unit: str, applies: Callable[[Mapping[str, Any]], bool],
    reason: str = "",
) -> Target:  # fmt: skip
    return Target("cuda", "verify_attn_sweep", f"attention {claim}", figure, bound, at_least, unit, applies, reason)


def _bookkeeping(cell: Cell) -> float | None:
    """The published pipeline by its own figure or by our rendering, whichever is faster, over the native one."""
    if not {"published", "native"} <= set(cell):
        return None
    figure = PUBLISHED_S.get(cell["native"].params["budget"], float("inf"))
    return min(figure, cell["published"].median) / cell["native"].median


def _linear(claim: str, least: int, most: int, reason: str) -> Target:
    return Target(
        "cuda", "linear", claim, times_faster("native", "torch"), 1.0,
        applies=lambda p: p["dtype"] == "bfloat16" and least <= p["M"] <= most, open=reason,
    )  # fmt: skip


def _tree_build(budget: int, most_us: float) -> Target:
    claim = f"tree_build, depth 15, budget {budget}"
    return Target("cuda", "tree_build_sweep", claim, microseconds("native"), most_us, False, "µs",
                  lambda p: p["budget"] == budget)  # fmt: skip


def _whole(budget: int, at_least: float, reason: str = "") -> Target:
    claim = f"draft to accept without the forwards, budget {budget}, against the published pipeline"
    return Target("cuda", "bookkeeping", claim, _bookkeeping, at_least, applies=lambda p: p["budget"] == budget,
                  open=reason)  # fmt: skip


def _int4(
    peer: str, claim: str, bound: float, rows: tuple[int, int], large: bool = True, reason: str = ""
) -> Target:  # fmt: skip
    """large: of the two products that are large enough to show the kernel."""

    def applies(p: Mapping[str, Any]) -> bool:
        return rows[0] <= p["M"] <= rows[1] and (not large or max(p["K"], p["N"]) == 18432)

    claim = f"INT4 linear against torch's {claim}, {'16' if rows == (16, 16) else f'{rows[0]} to {rows[1]}'} rows"
    return Target("cuda", "int4_linear", claim, times_faster("native", peer), bound, applies=applies, open=reason)


def _k26_step(prefix_len: int, contender: str, rank: str) -> Target:
    claim = f"an AR step of {rank} of Kimi K2.6 behind {prefix_len:,} tokens, over the floor"
    return Target("cuda", "k26_step", claim, times_floor(contender), 2.0, False, "x",
                  lambda p: p["rows"] == 1 and p["prefix_len"] == prefix_len and p["layers"] == 61 and p["tp"] == 8,
                  _SMALL)  # fmt: skip


def _matmul_share(cell: Cell) -> float | None:
    """Of the measured matmul rate."""
    return cell["native"].params["matmul_s"] / cell["native"].median if "native" in cell else None


def _end_to_end(model: str, dtype: str) -> Target:
    claim = f"{model} end to end in {dtype}: DDTree against AR, prefill included"
    return Target("cuda", "end_to_end", claim, times_faster("DDTree", "AR"), 1.0,
                  applies=lambda p: p["model"] == model and p["dtype"] == dtype)  # fmt: skip


def _is_whole_k26(params: Mapping[str, Any]) -> bool:
    return params["tp"] == 8 and params["layers"] == 61


def _k26_all_ranks() -> tuple[Target, ...]:
    """Of eight cards together: 250 tokens per second, a model built in five minutes, and no bit that trees change."""

    def differ(drafter: str) -> Target:
        claim = f"tokens of Kimi K2.6 on all its ranks that trees of the {drafter} drafter change, in a token or a bit"
        return Target("cuda", "k26_tp_text", claim, param(drafter, "changed_tokens"), 0, False, "tokens")

    return (
        Target("cuda", "k26_tp", "an AR step of Kimi K2.6 on eight cards behind 1,024 tokens (4,000 µs: 250 tokens/s)",
               microseconds("step"), 4000, False, "µs",
               lambda p: _is_whole_k26(p) and p["rows"] == 1 and p["prefix_len"] == 1024),
        Target("cuda", "k26_tp_build", "Kimi K2.6 is built on eight cards within five minutes",
               microseconds("random weights"), 3e8, False, "µs", _is_whole_k26),
        differ("oracle"),
        differ("random"),
        Target("cuda", "k26_tp_rows", "rows of trees on all ranks of Kimi K2.6 that differ from the same rows alone",
               param("native", "changed_rows"), 0, False, "rows"),
    )  # fmt: skip


_EVEN = "cuBLAS is a few percent ahead at some shapes from 17 rows on"
_START = "behind short prefixes planning, drawing items and folding them cost more than the products"
_FILL = "items behind 32k keys are too short to hide how they begin and end"
_TILE = "all row counts share one order of additions, whose 64-row products few rows do not fill"

_HOST = "our own times are the same on every host, those of the published pipeline's Python are not: this one is fast"
_FEW = "the shorter K, the smaller the part of a tile that is its loop; at more rows, values become BF16 too slowly"
_SMALL = "15 kernels a layer, one after the other, none of which fills the card for long: see k26_kernels"
_NARROW = "short K: the eight sums of a tile, of a step or two each, wait for each other; the floor is not of bytes"
_FEW_ROWS = "short K and few rows: tiles begin and end for longer than they multiply; the narrowest are bound by bytes"

_CUDA = (
    _linear("BF16 linear at 1 to 32 rows is faster than cuBLAS", 1, 32, _EVEN),
    _linear("BF16 linear at 64 rows is as fast as cuBLAS", 64, 64, _EVEN),
    Target("cuda", "invariance_cost", "invariance costs at most 5 % against free choice by rows, cuBLAS included",
           times_faster("invariant", "best shape", "best cuBLAS"), 1 / 1.05,
           open="at three shapes another tile, or cuBLAS, is beyond the bound"),
    _attention("of at least 512 query rows, prefix at least 32k", teraflops("native"), 300, True, "TFLOP/s",
               lambda p: _query_rows(p) >= 512 and p["prefix_len"] >= 32_768, _FILL),
    _attention("of at most 64 query rows, prefix 128k, over the floor", times_floor("native"), 2, False, "x",
               lambda p: _few(131_072, p), _TILE),
    _attention("of at most 64 query rows, prefix 1k", microseconds("native"), 15, False, "µs", lambda p: _few(1024, p),
               _START),
    _attention("of at most 64 query rows, prefix 8k", microseconds("native"), 25, False, "µs", lambda p: _few(8192, p)),
    _attention("is faster than materialised torch in every cell", times_faster("native", "torch masked"), 1, True, "x",
               lambda p: True, _START),
    _attention("is faster than torch that keeps probabilities in BF16 only",
               times_faster("native", "torch masked", "torch lean"), 1, True, "x", lambda p: True, _START),
    Target("cuda", "moe_experts", "an expert layer is faster than torch's",
           times_faster("native", "torch grouped", "torch indexed"), 1.0),
    Target("cuda", "draft_tree", "draft_topk and tree_build, budget 64, vocabulary 163,840", microseconds("native"), 40,
           False, "µs", lambda p: p["streams"] == 1),
    _tree_build(64, 12),
    _tree_build(256, 50),
    _tree_build(1023, 250),
    _whole(64, 15),
    _whole(256, 15, _HOST),
    _whole(1023, 20, _HOST),
    Target("cuda", "sample", "sampling is faster than torch's", times_faster("native", "torch"), 1.0),
    Target("cuda", "ar_step", "an AR step of tiny is faster than eager torch",
           times_faster("native", "eager torch"), 1.0),
    Target("cuda", "ar_step", "an AR step of tiny is faster than torch in a CUDA graph",
           times_faster("native", "torch graph"), 1.0),
    Target("cuda", "ngram_ddtree", "NGram DDTree is faster than AR on repetitive text, FP32",
           times_faster("DDTree", "AR"), 1.0),
    Target("cuda", "ngram_ddtree_bf16", "NGram DDTree is faster than AR on repetitive text, BF16",
           times_faster("DDTree", "AR"), 1.0),
    _int4("torch BF16", "BF16 product, 7168 by 18432", 2.5, (1, 8), reason=_FEW),
    _int4("torch BF16", "BF16 product, 7168 by 18432", 2.2, (16, 16), reason=_FEW),
    _int4("torch BF16", "BF16 product, 7168 by 18432", 1.3, (32, 64), reason=_FEW),
    _int4("torch INT4", "INT4 product", 1.0, (1, 128), large=False),
    Target("cuda", "int4_invariance_cost", "INT4: invariance costs at most 5 % against the fastest tile shape by rows",
           times_faster("invariant", "best shape"), 1 / 1.05,
           open="one row by 4,096 outputs: one and the same tile shape, called in two ways, a sample each"),
    Target("cuda", "int4_experts", "INT4 experts of Kimi K2.6, whole, 1 to 32 rows, over the floor",
           times_floor("native"), 1 / 0.6, False, "x", lambda p: p["rows"] <= 32 and p["width"] == 2048),
    Target("cuda", "int4_checks", "checks of INT4 products that failed", param("native", "failures"), 0, False,
           "checks"),
    *(_k26_step(n, "captured", "a rank of eight") for n in (1024, 32_768)),
    *(_k26_step(n, "share", "a rank among eight, but for the links,") for n in (1024, 32_768)),
    *_k26_all_ranks(),
    Target("cuda", "k26_prefill_product", "dense products of 8,192 tokens of Kimi K2.6, of the matmul rate",
           _matmul_share, 0.4, applies=lambda p: p["rows"] == 8192, open=_NARROW),
    Target("cuda", "k26_prefill_product", "the same, 256 tokens at a time, as the engine prefills",
           _matmul_share, 0.4, applies=lambda p: p["rows"] == 256, open=_FEW_ROWS),
    Target("cuda", "k26_prefill_rows", "rows of a prefill of Kimi K2.6 that differ from decode steps of them",
           param("native", "changed_rows"), 0, False, "rows"),
    *(_end_to_end(model, dtype) for model in ("tiny", "nano-k2") for dtype in ("float32", "bfloat16")),
    Target("cuda", "k26_step_rows", "rows of trees of a rank of Kimi K2.6 that differ from the same rows alone",
           param("native", "changed_rows"), 0, False, "rows"),
    Target("cuda", "invariance", "rows of trees that differ from the same rows one by one",
           param("native", "changed_rows"), 0, False, "rows"),
    Target("cuda", "invariance_total", "random cases in which rows were compared", param("native", "cases"), 1000,
           unit="cases"),
    Target("cuda", "invariance_tokens", "tokens that trees change", param("native", "changed_tokens"), 0, False,
           "tokens"),
)  # fmt: skip

TARGETS = _CPU + _CUDA + DRAFT_TARGETS
"""All targets; a record is judged by those of its kind of device."""


def targets_of(device: str) -> list[Target]:
    """Those of one kind of device, cpu or cuda."""
    return [target for target in TARGETS if target.device == device]
