"""How many distinct experts the rows of a step wake, layer by layer: what makes a further row dear in an MoE."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kdtree_nb.bench.text_drafts import draft_along
from kdtree_nb.drafters import AnyDrafter
from kdtree_nb.model import LatentCache, Model
from kdtree_nb.model.moe import MoeFeedForward
from kdtree_nb.native import ops
from kdtree_nb.tree import DraftTree


def expert_ids(
    model: Model, tree: DraftTree, cache: LatentCache, prefix_len: torch.Tensor
) -> list[torch.Tensor]:  # fmt: skip
    """The experts i32 [T, k] that each layer of experts chooses for the rows of a tree: a forward, layer by layer."""
    rows, found = ops.tree_rows(tree, prefix_len), []
    x = ops.embed(model.embedding, rows.token)
    for layer in model.layers:
        x = layer.attention(x, rows, tree, cache, prefix_len)
        if isinstance(layer.feed_forward, MoeFeedForward):
            found.append(layer.feed_forward.route(x)[1])
        x = layer.feed_forward(x)
    return found


def distinct_experts(ids: Sequence[torch.Tensor], num_rows: int) -> list[int]:
    """Of each layer, how many different experts the first num_rows rows choose."""
    return [len(torch.unique(chosen[:num_rows])) for chosen in ids]


def random_coverage(num_experts: int, top_k: int, num_rows: int) -> float:
    """Distinct experts of rows that choose top_k of num_experts at random: E (1 - (1 - k / E)^rows)."""
    return num_experts * (1 - (1 - top_k / num_experts) ** num_rows)


@torch.inference_mode()
def coverage(
    model: Model, drafter: AnyDrafter, prompts: Sequence[list[int]], texts: Sequence[list[int]],
    num_rows: Sequence[int], every: int = 8,
) -> dict[int, list[float]]:  # fmt: skip
    """Rows of a step -> mean distinct experts of each layer of experts, at every eighth place of the target's texts.

    The rows are the drafter's best-first trees, root included; smaller trees are the beginnings of the largest. Places
    where the drafter has too few candidates for that one are left out. Raises ValueError where it never has enough.
    """
    counts: dict[int, list[list[int]]] = {rows: [] for rows in num_rows}
    for prompt, text in zip(prompts, texts, strict=True):
        for ids in _chosen(model, drafter, prompt, text, max(num_rows), every):
            for rows, found in counts.items():
                found.append(distinct_experts(ids, rows))
    if not all(counts.values()):
        raise ValueError(f"coverage: expected a drafter of trees of {max(num_rows)} rows, got smaller ones throughout")
    return {rows: np.mean(found, axis=0).tolist() for rows, found in counts.items()}


def _chosen(
    model: Model, drafter: AnyDrafter, prompt: list[int], text: list[int], num_rows: int, every: int
) -> list[list[torch.Tensor]]:
    """The experts of each full tree along one text, from its end on: a tree overwrites what lies behind its prefix."""
    trees = []
    for place, draft in draft_along(model, drafter, [prompt], [text], num_rows - 1):
        if place % every == 0 and draft.log_probs.shape[1]:
            bonus = torch.tensor([(prompt + text[:place])[-1]], device=model.device)
            trees.append((place, ops.tree_build(draft.log_probs, draft.token_ids, bonus, num_rows - 1)))
    whole = torch.tensor([prompt + text], device=model.device)
    cache = model.new_cache(1, whole.shape[1] + num_rows)
    start = torch.zeros(1, dtype=torch.int32, device=model.device)
    certain = torch.zeros(1, whole.shape[1] - 1, 1, device=model.device)
    chain = ops.tree_build(certain, whole[:, 1:, None].contiguous(), whole[:, 0].clone(), whole.shape[1] - 1)
    model.forward(ops.tree_rows(chain, start), chain, cache, start, need_logits=False)
    full = [(place, tree) for place, tree in reversed(trees) if int(tree.num_nodes[0]) == num_rows]
    return [expert_ids(model, tree, cache, start + len(prompt) + place - 1) for place, tree in full]
