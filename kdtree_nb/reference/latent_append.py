"""latent_append: what MLA does with the joint rows of its first product, up to the cache."""

from __future__ import annotations

import numpy as np

from kdtree_nb.reference.cache import cache_append
from kdtree_nb.reference.precision import Rounding, exact
from kdtree_nb.reference.rms_norm import rms_norm
from kdtree_nb.reference.rope import rope


def latent_append(
    cache: np.ndarray, q_kv: np.ndarray, q_norm: np.ndarray | None, kv_norm: np.ndarray, cos_sin: np.ndarray,
    position: np.ndarray, stream: np.ndarray, slot: np.ndarray, eps: float, rounding: Rounding = exact,
) -> np.ndarray:  # fmt: skip
    """Columns Q | C | R of q_kv [T, Q+C+R]: norm the first two, rotate the last -> the normed query latents [T, Q].

    Latent and key go to cache[stream[t], slot[t]], one layer [S, P, C+R]. q_norm [Q], or None where Q is 0; kv_norm
    [C], cos_sin [positions, R]. Raises ValueError for a position outside the table or a place outside the cache.
    """
    C, R = len(kv_norm), cos_sin.shape[1]
    query, latent, key = np.split(q_kv, [q_kv.shape[1] - C - R, q_kv.shape[1] - R], axis=1)
    key = rope(key[:, None], cos_sin, position, rounding)[:, 0]
    cache_append(cache, rms_norm(latent, kv_norm, eps, rounding), key, stream, slot)
    return query if q_norm is None else rms_norm(query, q_norm, eps, rounding)
