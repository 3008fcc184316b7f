"""Checks of the tree kernels on CUDA against the numpy reference: top-k ids, trees and accepted paths exactly,
log-probs within 1e-5; ties, -inf, token 0, budgets around every border, invalid input."""

from __future__ import annotations

import os

import numpy as np
import torch
from check_common import BF16, DEV, F32, NAN, count_of, expect, poisoned
from op_lib import run, workspace_bytes

from kdtree_nb import reference
from kdtree_nb.reference.tree import Tree

INF = float("inf")
QUICK = bool(os.environ.get("QUICK"))  # few cases, for compute-sanitizer
BUDGETS = (0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 255, 256, 257, 1023)


def draft_topk(logits: torch.Tensor, num_candidates: int) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [B, L, V] -> (log_probs, token_ids) [B, L, K]; outputs and workspace poisoned before."""
    shape = (*logits.shape[:2], num_candidates)
    log_probs, token_ids = poisoned(*shape, dtype=F32), poisoned(*shape, dtype=torch.int64)
    fields = {
        "logits": logits,
        "log_probs": log_probs,
        "token_ids": token_ids,
        "vocab_size": logits.shape[2],
        "num_rows": logits.shape[0] * logits.shape[1],
        "num_candidates": num_candidates,
        "dtype": logits.dtype,
    }
    workspace = torch.full((workspace_bytes("draft_topk", **fields),), 0xFF, dtype=torch.uint8, device=DEV)
    run("draft_topk", **fields, workspace=workspace)
    return log_probs, token_ids


def tree_build(log_probs: torch.Tensor, token_ids: torch.Tensor, bonus: torch.Tensor, budget: torch.Tensor, size: int):
    """The tree's six arrays and the status of each stream; outputs poisoned before."""
    (streams, depth, candidates), slots = log_probs.shape, size + 1
    out = {
        "token": poisoned(streams, slots, dtype=torch.int64),
        "parent": poisoned(streams, slots, dtype=torch.int32),
        "depth": poisoned(streams, slots, dtype=torch.int32),
        "log_prob": poisoned(streams, slots, dtype=torch.float64),
        "ancestor_bits": poisoned(streams, slots, -(-slots // 64), dtype=torch.int64),
        "num_nodes": poisoned(streams, dtype=torch.int32),
        "status": poisoned(streams, dtype=torch.int32),
    }
    run(
        "tree_build",
        log_probs=log_probs,
        token_ids=token_ids,
        bonus=bonus,
        budget=budget,
        **out,
        num_streams=streams,
        max_depth=depth,
        num_candidates=candidates,
        max_budget=size,
    )
    return out


def random_logits(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Logits of one kind: random, few distinct values, all equal, mostly -inf, sharp."""
    x = torch.randn(*shape, device=DEV) * 3
    if kind == "few values":
        x = x.round()
    elif kind == "equal":
        x = torch.full(shape, 1.5, device=DEV)
    elif kind == "-inf":
        x[torch.rand(*shape, device=DEV) < 0.98] = -INF
    elif kind == "all -inf":
        x = torch.full(shape, -INF, device=DEV)
    elif kind == "rising":
        x = torch.arange(shape[-1], device=DEV).expand(shape).float() * 1e-3
    elif kind == "zeros":
        x = torch.where(torch.rand(*shape, device=DEV) < 0.5, 0.0, -0.0)
    return x.to(dtype).contiguous()


def check_draft_topk() -> None:
    kinds = ("random", "few values", "equal", "-inf", "all -inf", "rising", "zeros")
    for vocab, candidates in (
        (1, (1,)),
        (7, (1, 7)),
        (256, (1, 16, 256)),
        (331, (64, 331)),
        (4099, (1, 33, 1023)),
        (32003, (64, 1023)),
        (163840, (64, 256, 1023)),
    ):
        for kind in kinds[:3] if QUICK else kinds:
            for dtype in (F32, BF16):
                logits = random_logits(kind, (1 if vocab > 5000 else 2, 2, vocab), dtype)
                for k in candidates:
                    got, ids = draft_topk(logits, k)
                    want, want_ids = reference.draft_topk(logits.double().cpu().numpy(), k)
                    name = f"draft_topk V {vocab} K {k} {kind} {dtype}"
                    expect((ids.cpu().numpy() == want_ids).all(), f"{name}: token ids")
                    got = got.double().cpu().numpy()
                    both = np.isneginf(got) == np.isneginf(want)
                    off = np.abs(np.where(np.isneginf(want), 0, got) - np.where(np.isneginf(want), 0, want)).max()
                    expect(both.all() and off <= 1e-5 and (got <= 0).all(), f"{name}: log-probs off by {off:.1e}")
    logits = torch.randn(1, 4, 5000, device=DEV)
    clean = draft_topk(logits, 20)
    logits[0, 1, 4999], logits[0, 2, 0] = NAN, INF
    log_probs, ids = draft_topk(logits, 20)
    expect(log_probs[0, 1:3].isnan().all() and (ids[0, 1:3] == -1).all(), "draft_topk: NaN and +inf rows")
    for row in (0, 3):
        expect(torch.equal(log_probs[0, row], clean[0][0, row]), "draft_topk: a NaN row touched another row")


def candidates_of(kind: str, streams: int, depth: int, width: int, rng: np.random.Generator):
    """log_probs f32 [B, L, K] (sorted, at most 0) and token_ids [B, L, K] with distinct ids, token 0 among them."""
    if kind == "uniform":
        log_probs = np.full((streams, depth, width), -np.log(max(width, 2)))
    elif kind == "coarse":  # many equal sums
        log_probs = -np.sort(rng.integers(0, 4, (streams, depth, width)) * 0.5, axis=-1)
    elif kind == "certain":  # a long chain first
        log_probs = np.where(np.arange(width) == 0, 0.0, -5.0 - np.arange(width) * 0.1) + np.zeros((streams, depth, 1))
    elif kind == "huge":  # sums that round to equal
        log_probs = -np.sort(rng.random((streams, depth, width)) * 10.0 ** rng.integers(-8, 30, (streams, depth, 1)))
    else:
        x = rng.standard_normal((streams, depth, width)) * {"flat": 0.3, "sharp": 4.0, "drafter": 1.5}[kind]
        if kind == "drafter":  # a few likely tokens, less sure with depth
            x += np.linspace(16, 11, depth)[:, None] - 1.6 * np.log(np.arange(1, width + 1))
        log_probs = -np.sort(-(x - np.log(np.exp(x).sum(-1, keepdims=True))))
    if kind == "sharp":
        log_probs[:, :, width * 2 // 3 + 1 :] = -INF
        log_probs[:, depth // 2, :] = log_probs[:, depth // 2, :] if streams > 1 else -INF
    ids = np.argsort(rng.random((streams, depth, max(width, 4))), axis=-1)[..., :width]
    return np.minimum(log_probs, 0).astype(np.float32), ids.astype(np.int64)


def compare_tree(name: str, out: dict, want: Tree) -> None:
    expect((out["status"] == 0).all(), f"{name}: status {out['status'].tolist()}")
    for field in Tree._fields:
        got = out[field].cpu().numpy()
        expect(
            got.dtype == getattr(want, field).dtype and np.array_equal(got, getattr(want, field)), f"{name}: {field}"
        )
    expect(not np.signbit(out["log_prob"][:, 0].cpu().numpy()).any(), f"{name}: the root's log_prob is -0")


def check_tree_build() -> None:
    rng = np.random.default_rng(7)
    for kind in ("sharp", "flat", "coarse", "uniform", "certain", "huge"):
        for depth, width in ((1, 1), (1, 70), (15, 1), (3, 2), (70, 3), (15, 64), (7, 256), (32, 33), (15, 1023)):
            for budget in BUDGETS if width >= 64 else (0, 1, 33, 64, 100):
                if QUICK and (budget not in (0, 33, 65, 1023) or width not in (2, 64, 1023)):
                    continue
                log_probs, ids = candidates_of(kind, 1, depth, width, rng)
                bonus = rng.integers(0, 5, 1)
                device = [torch.tensor(x, device=DEV) for x in (log_probs, ids, bonus)]
                out = tree_build(*device, count_of(budget), budget)
                compare_tree(
                    f"tree_build {kind} L {depth} K {width} budget {budget}",
                    out,
                    reference.tree_build(log_probs, ids, bonus, budget),
                )
    budgets = np.array([0, 64, 5, 33, 65, 40, 1, 63, 64, 17], np.int32)
    log_probs, ids = candidates_of("sharp", 10, 15, 65, rng)
    bonus = rng.integers(0, 100, 10)
    device = [torch.tensor(x, device=DEV) for x in (log_probs, ids, bonus, budgets)]
    compare_tree("tree_build batch", tree_build(*device, 80), reference.tree_build(log_probs, ids, bonus, budgets, 80))


def check_random_trees() -> None:
    """Large trees of random shapes: level by level, and one node after the other where ties are many."""
    rng = np.random.default_rng(11)
    for kind in ("sharp", "flat", "coarse", "uniform", "certain", "huge", "drafter"):
        for _ in range(3 if QUICK else 40):
            depth, width = int(rng.integers(1, 33)), int(rng.choice([2, 5, 65, 100, 256, 700, 1023]))
            budget = int(rng.choice([60, 65, 66, 100, 127, 256, 300, 777, 1023]))
            log_probs, ids = candidates_of(kind, 1, depth, width, rng)
            bonus = rng.integers(0, 5, 1)
            device = [torch.tensor(x, device=DEV) for x in (log_probs, ids, bonus)]
            out = tree_build(*device, count_of(budget), budget)
            name = f"tree_build random {kind} L {depth} K {width} budget {budget}"
            compare_tree(name, out, reference.tree_build(log_probs, ids, bonus, budget))


def check_invalid_candidates() -> None:
    rng = np.random.default_rng(8)
    for width in (5, 64, 1023):
        for fault in ("NaN", "NaN last", "positive", "rising", "repeated", "negative id", "budget", "bonus"):
            log_probs, ids = candidates_of("flat", 3, 6, width, rng)
            bonus, budget = np.array([1, 2, 3]), np.array([20, 20, 20], np.int32)
            if fault == "NaN":
                log_probs[1, 2, width // 2] = NAN
            elif fault == "NaN last":
                log_probs[1, 5, -1] = NAN
            elif fault == "positive":
                log_probs[1, 3, 0] = 1e-6
            elif fault == "rising":
                log_probs[1, 4, 2], log_probs[1, 4, 3] = log_probs[1, 4, 3] - 1e-3, log_probs[1, 4, 2]
            elif fault == "repeated":
                ids[1, 5, width - 1] = ids[1, 5, 0]
            elif fault == "negative id":
                ids[1, 0, 1] = -1
            elif fault == "budget":
                budget[1] = 31
            else:
                bonus[1] = -1
            out = tree_build(*(torch.tensor(x, device=DEV) for x in (log_probs, ids, bonus, budget)), 30)
            status = out["status"].tolist()
            expect(status == [0, 4 if fault in ("budget", "bonus") else 1, 0], f"tree_build {fault} {width}: {status}")
            expect(out["num_nodes"].tolist() == [21, 0, 21], f"tree_build {fault}: num_nodes")
            expect(
                (out["token"][1] == -1).all() and (out["ancestor_bits"][1] == 0).all(), f"tree_build {fault}: fillers"
            )


def random_trees(rng: np.random.Generator, streams: int, size: int) -> Tree:
    """Trees of random sizes, some without nodes; siblings have distinct tokens, token 0 is frequent."""
    log_probs, ids = candidates_of("flat", streams, 9, min(size + 1, 12), rng)
    tree = reference.tree_build(log_probs, ids, rng.integers(0, 9, streams), rng.integers(0, size + 1, streams), size)
    tree.num_nodes[rng.random(streams) < 0.2] = 0
    return tree


def check_rows_and_accept() -> None:
    rng = np.random.default_rng(9)
    for streams, size in ((1, 0), (1, 1), (3, 31), (10, 64), (4, 255), (10, 1023)):
        for _ in range(4):
            tree = random_trees(rng, streams, size)
            prefix = rng.integers(0, 5000, streams).astype(np.int32)
            on_device = {
                f: torch.tensor(getattr(tree, f), device=DEV) for f in ("token", "parent", "depth", "num_nodes")
            }
            capacity, want = streams * (size + 1), reference.tree_rows(tree, prefix)
            rows = {f"row_{f}": poisoned(capacity, dtype=torch.int32) for f in ("stream", "node", "position", "slot")}
            rows["row_token"] = poisoned(capacity, dtype=torch.int64)
            begin, count = poisoned(streams, dtype=torch.int32), poisoned(1, dtype=torch.int32)
            run(
                "tree_rows",
                **{k: on_device[k] for k in ("token", "depth", "num_nodes")},
                prefix_len=torch.tensor(prefix, device=DEV),
                **rows,
                num_streams=streams,
                num_tree_slots=size + 1,
                row_begin=begin,
                num_rows_device=count,
            )
            total = int(tree.num_nodes.sum())
            expect(count.item() == total, "tree_rows: number of rows")
            for field in want._fields:
                got = rows[f"row_{field}"].cpu().numpy()
                expect(np.array_equal(got[:total], getattr(want, field)), f"tree_rows {streams}x{size}: {field}")
                expect((got[total:] == -1).all(), f"tree_rows {streams}x{size}: fillers of {field}")
            check_accept(rng, tree, on_device, begin, f"tree_accept {streams}x{size}")


def check_accept(rng: np.random.Generator, tree: Tree, on_device: dict, begin: torch.Tensor, name: str) -> None:
    streams, slots = tree.token.shape
    target = rng.integers(0, 13, (streams, slots))
    for b in range(streams):  # most choices are a child's token, so that paths are long
        for i in range(1, tree.num_nodes[b]):
            if rng.random() < 0.7:
                target[b, tree.parent[b, i]] = tree.token[b, i]
    want = reference.tree_accept(tree, target, 9)
    flat = np.concatenate([target[b, : tree.num_nodes[b]] for b in range(streams)] + [np.zeros(1, np.int64)])
    for values, row_begin in ((target, None), (flat, begin)):
        path, count = poisoned(streams, 9, dtype=torch.int32), poisoned(streams, dtype=torch.int32)
        token = poisoned(streams, dtype=torch.int64)
        run(
            "tree_accept",
            **{k: on_device[k] for k in ("token", "parent", "num_nodes")},
            target_token=torch.tensor(values, device=DEV),
            accepted_path=path,
            num_accepted=count,
            next_token=token,
            num_streams=streams,
            num_tree_slots=slots,
            max_depth=9,
            row_begin=row_begin,
        )
        for got, expected, what in zip((path, count, token), want, ("path", "count", "next token"), strict=True):
            expect(np.array_equal(got.cpu().numpy(), expected), f"{name}: {what}, rows {row_begin is not None}")


def check_trees() -> None:
    """All tree kernels."""
    checks = (check_draft_topk, check_tree_build, check_random_trees, check_invalid_candidates, check_rows_and_accept)
    for check in checks:
        check()
        torch.cuda.synchronize()
