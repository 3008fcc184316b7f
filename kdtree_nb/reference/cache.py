"""cache_append and cache_compact: the two writes to the latent cache. Both change the cache in place."""

from __future__ import annotations

import numpy as np


def cache_append(
    cache: np.ndarray, latent: np.ndarray, k_rope: np.ndarray, stream: np.ndarray, slot: np.ndarray
) -> None:
    """cache[stream[t], slot[t]] = [latent[t], k_rope[t]]: one layer [S, P, C+R], latent [T, C], k_rope [T, R].

    Raises ValueError for a stream or slot outside the cache.
    """
    for name, index, size in (("stream", stream, cache.shape[0]), ("slot", slot, cache.shape[1])):
        outside = index[(index < 0) | (index >= size)]
        if outside.size:
            raise ValueError(f"cache_append: expected {name} in 0 … {size - 1}, got {outside[0]}")
    cache[stream, slot] = np.concatenate([latent, k_rope], axis=-1)


def cache_compact(
    cache: np.ndarray, prefix_len: np.ndarray, accepted_path: np.ndarray, num_accepted: np.ndarray
) -> None:
    """Move the accepted nodes' rows to directly behind the root, in every layer: cache [layers, S, P, C+R].

    Slot prefix_len + 1 + j receives slot prefix_len + accepted_path[j] for j < num_accepted. prefix_len int [S],
    accepted_path int [S, L], num_accepted int [S].
    """
    for stream, count in enumerate(num_accepted):
        root = prefix_len[stream]
        source = root + accepted_path[stream, :count]
        cache[:, stream, root + 1 : root + 1 + count] = cache[:, stream, source]  # the right side is a copy
