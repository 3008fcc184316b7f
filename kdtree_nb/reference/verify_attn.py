"""verify_attn: attention of tree nodes over the latent cache, in the absorbed form of MLA."""

from __future__ import annotations

import numpy as np

from kdtree_nb.reference.precision import Rounding, exact
from kdtree_nb.reference.tree import Tree, path
from kdtree_nb.reference.tree_rows import Rows


def visible_slots(tree: Tree, stream: int, node: int, prefix_len: int) -> list[int]:
    """Cache slots a node attends to: the whole prefix, then its ancestors and itself, in order of position."""
    return [*range(prefix_len), *(prefix_len + ancestor for ancestor in path(tree, stream, node))]


def verify_attn(
    q_latent: np.ndarray,
    q_rope: np.ndarray,
    cache: np.ndarray,
    rows: Rows,
    tree: Tree,
    prefix_len: np.ndarray,
    scale: float,
    rounding: Rounding = exact,
) -> np.ndarray:
    """softmax(scale · (q_latent · latent + q_rope · k_rope)) · latent over the visible slots of each row.

    q_latent [T, H, C], q_rope [T, H, R], one layer's cache [S, P, C+R], prefix_len int [S] -> [T, H, C].
    Slots that a row does not see are not read. All heads share one latent, which is both key and value.
    """
    latent_dim = q_latent.shape[-1]
    out = np.empty_like(q_latent)
    for t, (stream, node) in enumerate(zip(rows.stream, rows.node, strict=True)):
        keys = cache[stream, visible_slots(tree, stream, node, prefix_len[stream])]  # [keys, C+R]
        latent, k_rope = keys[:, :latent_dim], keys[:, latent_dim:]
        scores = scale * (q_latent[t] @ latent.T + q_rope[t] @ k_rope.T)  # [H, keys]
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[t] = (rounding(p) @ latent) / p.sum(axis=-1, keepdims=True)
    return rounding(out)
