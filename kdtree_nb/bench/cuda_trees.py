"""Benchmarks of what lies between draft and acceptance on a GPU, at the vocabulary of Kimi K2 and a depth of 15."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from kdtree_nb.bench.lab import Lab
from kdtree_nb.bench.published import published_step
from kdtree_nb.bench.runner import Effort, Measurement, Sample, compete, once, require
from kdtree_nb.bench.tree_heapq import build_tree_heapq
from kdtree_nb.native import ops
from kdtree_nb.tree import DraftTree

VOCAB_SIZE, DEPTH = 163_840, 15
CANDIDATES = (64, 16, 256, 1023)
BUDGETS = (64, 256, 512, 1023)
STREAMS = (1, 10)
NUM_COPIES = 16
"""Logits in turn, 157 MB: more than the L2 cache holds."""

NUM_LAYERS, WIDTH, PREFIX_LEN = 61, 576, 100
"""Of the cache that is compacted."""


def drafter_logits(lab: Lab, num_streams: int = 1) -> Tensor:
    """f32 [B, L, V] like a drafter's: a few likely tokens at each depth, less sure with depth, over a flat rest."""
    logits = lab.randn(num_streams, DEPTH, VOCAB_SIZE).mul_(1.5)
    num_likely = min(200, VOCAB_SIZE)
    likely = torch.rand(logits.shape, device=lab.device).topk(num_likely, -1).indices
    falling = 1.6 * torch.arange(1, num_likely + 1, device=lab.device).log()
    peak = torch.linspace(16, 11, DEPTH, device=lab.device)[None, :, None] - falling
    return logits.scatter_(-1, likely, peak + lab.randn(num_streams, DEPTH, num_likely))


def torch_topk(logits: Tensor, num_candidates: int) -> tuple[Tensor, Tensor]:
    """draft_topk in torch."""
    values, ids = logits.topk(num_candidates, -1)
    return values - logits.logsumexp(-1, keepdim=True), ids


def draft_topk(lab: Lab, effort: Effort) -> list[Measurement]:
    """Log-softmax over the vocabulary and its K largest, 15 depths of one stream: torch, and the native operation."""
    logits = [drafter_logits(lab) for _ in range(NUM_COPIES)]
    results = []
    for K in effort.some(CANDIDATES):
        want, got = torch_topk(logits[0], K)[0], ops.draft_topk(logits[0], K)[0]
        require(torch.allclose(want, got, rtol=0, atol=1e-5), "draft_topk", "the log-probs to 1e-5")
        contenders = {
            "torch": [lambda x=x, K=K: torch_topk(x, K) for x in logits],
            "native": [lambda x=x, K=K: ops.draft_topk(x, K) for x in logits],
        }
        results += lab.compete("draft_topk", contenders, effort, _topk_params(lab, 1) | {"K": K})
    return results


def _topk_params(lab: Lab, num_streams: int) -> dict[str, object]:
    num_values = num_streams * DEPTH * VOCAB_SIZE
    sizes = {"streams": num_streams, "depth": DEPTH, "V": VOCAB_SIZE}
    return sizes | lab.work(num_values * 4, 4 * num_values, torch.float32)


def tree_build_sweep(lab: Lab, effort: Effort) -> list[Measurement]:
    """A tree over 15 depths: native, and Python's heapq. The native operation has its candidates on the GPU and is
    timed by graph replays, the published algorithm has them on the host and is timed by the clock."""
    logits = drafter_logits(lab)
    results = []
    for budget in effort.some(BUDGETS):
        log_probs, ids = ops.draft_topk(logits, budget)
        bonus = torch.ones(1, dtype=torch.int64, device=lab.device)
        on_host = log_probs[0].cpu(), ids[0].cpu(), budget
        published, tree = build_tree_heapq(*on_host), ops.tree_build(log_probs, ids, bonus, budget)
        require(tree.parent[0].tolist() == published.parent, "tree_build_sweep", "parents")
        require(torch.equal(tree.visibility(0), published.visibility), "tree_build_sweep", "visibility")
        native = [lambda a=(log_probs, ids, bonus, budget): ops.tree_build(*a)]
        contenders = {"heapq": once(lambda a=on_host: build_tree_heapq(*a)), "native": lab.sample(native)}
        params = {"budget": budget, "depth": DEPTH, "num_candidates": budget}
        results += compete("tree_build_sweep", contenders, effort.num_rounds, params)
    return results


def draft_tree(lab: Lab, effort: Effort) -> list[Measurement]:
    """draft_topk and tree_build together, budget 64, one stream and ten."""
    results = []
    for streams in STREAMS:
        logits = [drafter_logits(lab, streams) for _ in range(max(2, NUM_COPIES // streams))]
        bonus = torch.ones(streams, dtype=torch.int64, device=lab.device)
        calls = [lambda x=x, b=bonus: ops.tree_build(*ops.draft_topk(x, 64), b, 64) for x in logits]
        params = _topk_params(lab, streams) | {"budget": 64}
        results += lab.compete("draft_tree", {"native": calls}, effort, params)
    return results


class Bookkeeping:
    """A step of one stream without its two forwards: top-k, tree, rows, walk, compaction of a cache of 61 layers."""

    def __init__(self, lab: Lab, budget: int, logits: list[Tensor]) -> None:
        self.budget, self.logits = budget, logits
        self.bonus = torch.ones(1, dtype=torch.int64, device=lab.device)
        self.prefix_len = torch.full((1,), PREFIX_LEN, dtype=torch.int32, device=lab.device)
        self.cache = lab.randn(NUM_LAYERS, 1, PREFIX_LEN + budget + 1, WIDTH, dtype=torch.bfloat16)
        self.targets = [_target_of_deepest(self.tree(x)) for x in logits]

    def tree(self, logits: Tensor) -> DraftTree:
        """The first two verbs."""
        return ops.tree_build(*ops.draft_topk(logits, self.budget), self.bonus, self.budget)

    def step(self, copy: int) -> tuple[Tensor, Tensor, Tensor]:
        """Everything: accepted_path, num_accepted, next_token."""
        tree = self.tree(self.logits[copy])
        ops.tree_rows_padded(tree, self.prefix_len)
        accepted = ops.tree_accept(tree, self.targets[copy], DEPTH)
        ops.cache_compact(self.cache, self.prefix_len, accepted[0], accepted[1])
        return accepted

    def published(self, copy: int) -> tuple[list[int], int]:
        """What the published pipeline makes of the same logits and choices."""
        return published_step(self.logits[copy][0], self.budget, self.targets[copy][0])

    def check(self) -> None:
        """Both accept the same path."""
        path, num_accepted, next_token = self.step(0)
        found = path[0, : int(num_accepted)].tolist(), int(next_token)
        require(found == self.published(0) and found[0] != [], "bookkeeping", "accepted path and next token")


def bookkeeping(lab: Lab, effort: Effort) -> list[Measurement]:
    """All of a step but the two forwards: our rendering of the published pipeline, and the native operations. The first
    by the clock from idle to idle, its compaction left out; the second by graph replays, compaction included."""
    logits = [drafter_logits(lab) for _ in range(NUM_COPIES)]
    results = []
    for budget in effort.some(BUDGETS):
        work = Bookkeeping(lab, budget, logits)
        work.check()
        native = [lambda i=i, w=work: w.step(i) for i in range(NUM_COPIES)]
        contenders = {"published": _by_turns(lab, work.published), "native": lab.sample(native)}
        params = {"budget": budget, "depth": DEPTH, "V": VOCAB_SIZE, "accepted": int(work.step(0)[1])}
        results += compete("bookkeeping", contenders, effort.num_rounds, params)
        results += _parts(lab, effort, work, {"budget": budget, "depth": DEPTH})
    return results


def _by_turns(lab: Lab, function: Callable[[int], object]) -> Sample:
    copies = itertools.cycle(range(NUM_COPIES))
    return lab.wall(lambda: function(next(copies)))


def _parts(lab: Lab, effort: Effort, work: Bookkeeping, params: dict[str, object]) -> list[Measurement]:
    """Each operation alone."""
    tree = work.tree(work.logits[0])
    path, num_accepted, _ = ops.tree_accept(tree, work.targets[0], DEPTH)
    calls = {
        "draft_topk": [lambda x=x: ops.draft_topk(x, work.budget) for x in work.logits],
        "tree_rows": [lambda: ops.tree_rows_padded(tree, work.prefix_len)],
        "tree_accept": [lambda: ops.tree_accept(tree, work.targets[0], DEPTH)],
        "cache_compact": [lambda: ops.cache_compact(work.cache, work.prefix_len, path, num_accepted)],
    }
    return lab.compete("bookkeeping_part", calls, effort, params)


def _target_of_deepest(tree: DraftTree) -> Tensor:
    """A target's choices i64 [1, N] that accept the path to the deepest node."""
    token, parent, depth = (t[0].tolist() for t in (tree.token, tree.parent, tree.depth))
    target, node = [-1] * len(token), depth.index(max(depth))
    while node > 0:
        target[parent[node]] = token[node]
        node = parent[node]
    return torch.tensor([target], device=tree.token.device)
