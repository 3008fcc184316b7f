"""What benchmarks have in common: models, prompts and a cache that holds a real text."""

from __future__ import annotations

import functools
import json
from typing import NamedTuple

import numpy as np
import torch

from kdtree_nb.model import LatentCache, Model, load_model
from kdtree_nb.model.checkpoint import DATA_DIR
from kdtree_nb.native import ops
from kdtree_nb.tree import DraftTree

model = functools.lru_cache(maxsize=8)(load_model)
"""`load_model`, once per name and dtype."""


def prompts(kind: str) -> dict[str, list[int]]:
    """Name -> byte ids of this project's prompts of one kind."""
    entries = json.loads((DATA_DIR / "prompts.json").read_text(encoding="utf-8"))["prompts"]
    return {entry["name"]: list(entry["text"].encode()) for entry in entries if entry["kind"] == kind}


class Scene(NamedTuple):
    """A cache of one stream whose first prefix_len slots hold a text, and its last token."""

    cache: LatentCache
    prefix_len: torch.Tensor  # i32 [1]
    bonus: torch.Tensor  # i64 [1]


def chain(tokens: torch.Tensor) -> DraftTree:
    """One tree without branches over i64 [n] tokens, n at least 1."""
    certain = torch.zeros(1, len(tokens) - 1, 1)
    return ops.tree_build(certain, tokens[1:].view(1, -1, 1).contiguous(), tokens[:1].clone(), len(tokens) - 1)


def scene(model: Model, prefix_len: int, room: int = 128) -> Scene:
    """`prefix_len` tokens of a repetitive prompt (repeated if short) in a cache with `room` more slots."""
    text = next(iter(prompts("repetitive").values()))
    tokens = torch.tensor((text * (prefix_len // len(text) + 1))[: prefix_len + 1])
    cache, length = model.new_cache(1, prefix_len + room), torch.zeros(1, dtype=torch.int32)
    tree = chain(tokens[:-1])
    with torch.inference_mode():
        model.forward(ops.tree_rows(tree, length), tree, cache, length, need_logits=False)
    return Scene(cache, torch.tensor([prefix_len], dtype=torch.int32), tokens[-1:])


def random_candidates(depth: int, num_candidates: int, vocab_size: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(log_probs f32 [L, K], token_ids i64 [L, K]) of random peaked marginals, best first."""
    rng = np.random.default_rng(seed)
    logits = 2.0 * rng.standard_normal((depth, vocab_size))
    log_probs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    ids = np.argsort(-log_probs, axis=1)[:, :num_candidates]
    return np.take_along_axis(log_probs, ids, 1).astype(np.float32), ids.astype(np.int64)


def random_tree(num_nodes: int, bonus: torch.Tensor, vocab_size: int) -> DraftTree:
    """A bushy tree of `num_nodes` nodes, root included, of depth at most 8 where that is enough."""
    log_probs, ids = random_candidates(8, min(num_nodes, vocab_size), vocab_size)
    tree = ops.tree_build(torch.from_numpy(log_probs)[None], torch.from_numpy(ids)[None], bonus, num_nodes - 1)
    if int(tree.num_nodes[0]) != num_nodes:
        raise ValueError(f"random_tree: expected {num_nodes} nodes, got {int(tree.num_nodes[0])}")
    return tree
