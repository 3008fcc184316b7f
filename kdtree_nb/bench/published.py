"""What the published DDTree code does between draft and acceptance of a stream: our rendering, and its own figures."""

from __future__ import annotations

import torch

from kdtree_nb.bench.tree_heapq import build_tree_heapq

PUBLISHED_S = {64: 1.15e-3, 256: 2.15e-3, 512: 3.7e-3, 1023: 7.3e-3}
"""Budget -> seconds of the published code (https://github.com/liranringel/ddtree at commit c96427a, of the paper
arXiv:2604.12989) run on an H200 with vocabulary 163,840 and depth 15, compaction not counted. The last is for
budget 1024."""


def published_step(logits: torch.Tensor, budget: int, target_token: torch.Tensor) -> tuple[list[int], int]:
    """Top-k on the device, two copies to the host, the tree in Python, three uploads, a copy, a walk on the host.

    logits f32 [L, V], target_token i64 [N] the target's choice at every node -> (accepted nodes, next token). The
    uploads are what the target's forward would read; the forward and the compaction are left out.
    """
    values, ids = logits.topk(budget, -1)
    log_probs = values - logits.logsumexp(-1, keepdim=True)
    tree = build_tree_heapq(log_probs.cpu(), ids.cpu(), budget)
    for read_by_forward in (tree.token, tree.depth, tree.visibility):
        read_by_forward.to(logits.device)
    choice, node, path = target_token.tolist(), 0, []
    while choice[node] in tree.children[node]:
        node = tree.children[node][choice[node]]
        path.append(node)
    return path, choice[node]
