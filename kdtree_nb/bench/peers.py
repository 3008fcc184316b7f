"""Plain Python and plain torch forms of single steps, to measure the native ones against."""

from __future__ import annotations

import torch
from torch import Tensor

from kdtree_nb.drafters import DraftCandidates, DraftContext, Drafter
from kdtree_nb.tree import DraftTree


class FirstCandidateOnly:
    """The same drafter restricted to its favourite of every depth: a chain instead of a tree."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.depth = drafter, drafter.depth

    def draft(self, context: DraftContext) -> DraftCandidates:
        """The first candidate of each depth."""
        log_probs, token_ids = self.drafter.draft(context)
        return DraftCandidates(log_probs[..., :1].contiguous(), token_ids[..., :1].contiguous())


def masked_attention(q: Tensor, cache: Tensor, mask: Tensor, latent_dim: int, scale: float) -> Tensor:
    """Dense attention in latent space: q [T, H, C+R], cache [P, C+R], mask bool [T, P] -> [T, H, C].

    All heads share one key path, so scores are one matmul.
    """
    T, H, width = q.shape
    scores = torch.mm(q.view(T * H, width), cache.t()).view(T, H, -1).float() * scale
    probability = scores.masked_fill_(~mask.unsqueeze(1), -torch.inf).softmax(-1).to(q.dtype)
    return torch.mm(probability.view(T * H, -1), cache[:, :latent_dim]).view(T, H, latent_dim)


def tree_mask(tree: DraftTree, stream: int, prefix_len: int) -> Tensor:
    """bool [n, prefix_len + n]: every node sees the prefix, its ancestors and itself."""
    visible = tree.visibility(stream)
    return torch.cat([torch.ones(visible.shape[0], prefix_len, dtype=torch.bool), visible], 1)


def accept_python(tree: DraftTree, stream: int, target_token: Tensor) -> tuple[list[int], int]:
    """(accepted node indices, next token): children by dictionary, then a walk from the root."""
    count = int(tree.num_nodes[stream])
    token, parent = tree.token[stream, :count].tolist(), tree.parent[stream, :count].tolist()
    target = target_token[stream, :count].tolist()
    child = {(parent[node], token[node]): node for node in range(1, count)}
    path, node = [], 0
    while (node := child.get((node, target[node]), -1)) >= 0:
        path.append(node)
        last = node
    return path, target[last if path else 0]


def compact_python(cache: Tensor, stream: int, prefix_len: int, path: list[int]) -> None:
    """Gather the accepted rows of every layer behind the root, in place: cache [layers, S, P, C+R]."""
    first = prefix_len + 1
    rows = torch.tensor([prefix_len + node for node in path], dtype=torch.long)
    cache[:, stream, first : first + len(path)] = cache[:, stream, rows]
