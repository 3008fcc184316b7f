"""Times of the draft-to-accept pipeline on CUDA, beside our own rendering of the published one."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from check_common import BF16, DEV, F32
from op_lib import run, workspace_bytes
from timing import graph_times

from kdtree_nb.bench import Lab
from kdtree_nb.bench.cuda_trees import DEPTH, drafter_logits
from kdtree_nb.bench.cuda_trees import NUM_COPIES as COPIES
from kdtree_nb.bench.cuda_trees import VOCAB_SIZE as VOCAB
from kdtree_nb.bench.published import published_step


class Pipeline:
    """draft_topk -> tree_build -> tree_rows -> tree_accept -> cache_compact for one budget, all buffers allocated."""

    def __init__(self, streams: int, budget: int, layers: int = 61) -> None:
        slots, int32, int64 = budget + 1, torch.int32, torch.int64
        self.streams, self.budget, self.layers = streams, budget, layers

        def new(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=DEV)

        self.log_probs, self.ids = (new(streams, DEPTH, budget, dtype=t) for t in (F32, int64))
        self.bonus, self.prefix = new(streams, dtype=int64), new(streams, dtype=int32) + 100
        self.budgets = torch.full((streams,), budget, dtype=int32, device=DEV)
        self.tree = {
            "token": new(streams, slots, dtype=int64),
            "parent": new(streams, slots, dtype=int32),
            "depth": new(streams, slots, dtype=int32),
            "log_prob": new(streams, slots, dtype=torch.float64),
            "ancestor_bits": new(streams, slots, -(-slots // 64), dtype=int64),
            "num_nodes": new(streams, dtype=int32),
            "status": new(streams, dtype=int32),
        }
        self.rows = {f"row_{f}": new(streams * slots, dtype=int32) for f in ("stream", "node", "position", "slot")}
        self.rows["row_token"] = new(streams * slots, dtype=int64)
        self.begin, self.count, self.target = (
            new(streams, dtype=int32),
            new(1, dtype=int32),
            new(streams, slots, dtype=int64),
        )
        self.path, self.accepted = new(streams, DEPTH, dtype=int32), new(streams, dtype=int32)
        self.next = new(streams, dtype=int64)
        self.cache = torch.randn(layers, streams, 100 + slots, 576, device=DEV).to(BF16)
        self.workspace = new(workspace_bytes("draft_topk", num_rows=streams * DEPTH), dtype=torch.uint8)

    def topk(self, logits: torch.Tensor) -> None:
        run(
            "draft_topk",
            logits=logits,
            log_probs=self.log_probs,
            token_ids=self.ids,
            num_rows=self.streams * DEPTH,
            vocab_size=VOCAB,
            num_candidates=self.budget,
            dtype=logits.dtype,
            workspace=self.workspace,
        )

    def build(self) -> None:
        run(
            "tree_build",
            log_probs=self.log_probs,
            token_ids=self.ids,
            bonus=self.bonus,
            budget=self.budgets,
            **self.tree,
            num_streams=self.streams,
            max_depth=DEPTH,
            num_candidates=self.budget,
            max_budget=self.budget,
        )

    def flatten(self) -> None:
        run(
            "tree_rows",
            **{k: self.tree[k] for k in ("token", "depth", "num_nodes")},
            prefix_len=self.prefix,
            **self.rows,
            num_streams=self.streams,
            num_tree_slots=self.budget + 1,
            row_begin=self.begin,
            num_rows_device=self.count,
        )

    def accept(self) -> None:
        run(
            "tree_accept",
            **{k: self.tree[k] for k in ("token", "parent", "num_nodes")},
            target_token=self.target,
            accepted_path=self.path,
            num_accepted=self.accepted,
            next_token=self.next,
            num_streams=self.streams,
            num_tree_slots=self.budget + 1,
            max_depth=DEPTH,
        )

    def compact(self) -> None:
        run(
            "cache_compact",
            cache=self.cache,
            prefix_len=self.prefix,
            accepted_path=self.path,
            num_accepted=self.accepted,
            num_layers=self.layers,
            num_streams=self.streams,
            num_slots=self.cache.shape[2],
            width=576,
            max_depth=DEPTH,
            dtype=BF16,
        )

    def all(self, logits: torch.Tensor) -> None:
        for step in (lambda: self.topk(logits), self.build, self.flatten, self.accept, self.compact):
            step()

    def choose_targets(self) -> None:
        """The target agrees along the path to the deepest node, so that acceptance and compaction have work."""
        parent, depth, token = (self.tree[k].cpu() for k in ("parent", "depth", "token"))
        target = self.target.cpu()
        for b in range(self.streams):
            node = int(depth[b].argmax())
            while node > 0:
                target[b, parent[b, node]] = token[b, node]
                node = int(parent[b, node])
        self.target.copy_(target)


def time_trees(report: Callable[[str, list[float]], float]) -> None:
    """Each step for budgets 64 to 1023, all five together, and the published pipeline; `report` returns the median."""
    lab = Lab(DEV)
    logits = [drafter_logits(lab) for _ in range(COPIES)]
    for budget in (64, 256, 512, 1023):
        pipeline = Pipeline(1, budget)
        report(
            f"draft_topk F32 15x{VOCAB} K {budget}", graph_times([lambda x=x, p=pipeline: p.topk(x) for x in logits])
        )
        report(f"tree_build depth 15 budget {budget}", graph_times([pipeline.build] * 20))
        report(f"tree_rows {budget}", graph_times([pipeline.flatten] * 20))
        pipeline.all(logits[0])
        pipeline.choose_targets()
        pipeline.accept()
        report(f"tree_accept {budget}", graph_times([pipeline.accept] * 20))
        report(f"cache_compact 61 layers, {int(pipeline.accepted)} accepted", graph_times([pipeline.compact] * 20))
        whole = report(f"all five, budget {budget}", graph_times([lambda x=x, p=pipeline: p.all(x) for x in logits]))
        times = []
        for i in range(6):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            published_step(logits[i][0], budget, pipeline.target[0])
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        print(
            f"  ratio to the published pipeline {report(f'published pipeline, budget {budget}', times[1:]) / whole:.1f}"
        )
    bf16 = [x.to(BF16) for x in logits]
    pipeline = Pipeline(1, 64)
    report("draft_topk BF16 K 64", graph_times([lambda x=x: pipeline.topk(x) for x in bf16]))
    del logits, bf16
    ten, pipeline = [drafter_logits(lab, 10) for _ in range(2)], Pipeline(10, 64, 8)
    report("draft_topk F32 10 streams K 64", graph_times([lambda x=x: pipeline.topk(x) for x in ten]))
    report("tree_build 10 streams budget 64", graph_times([pipeline.build] * 20))
