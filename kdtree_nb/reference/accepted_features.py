"""accepted_features: the hidden states of what a verified step has accepted, side by side."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def accepted_features(
    hidden: Sequence[np.ndarray], first_row: np.ndarray, prefix_len: np.ndarray, accepted_path: np.ndarray,
    num_accepted: np.ndarray, active: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """hidden: n of [T, D] -> (features [S * (L + 1), n * D], stream i32 and position i32 [S * (L + 1)]).

    Per stream first the root, at row first_row[s] and position prefix_len[s], then the nodes of accepted_path int [S,
    L], of which num_accepted[s] are. What is no token, as of a stream that is not active, has features 0, stream and
    position -1. Raises ValueError for rows outside.
    """
    num_streams, num_places = len(accepted_path), accepted_path.shape[1] + 1
    joined = np.concatenate(list(hidden), axis=1)
    features = np.zeros((num_streams, num_places, joined.shape[1]), joined.dtype)
    stream, position = (np.full((num_streams, num_places), -1, np.int32) for _ in range(2))
    for s in np.flatnonzero(active):
        nodes = np.concatenate([[0], accepted_path[s, : num_accepted[s]]]).astype(np.int64)
        row = first_row[s] + nodes
        if nodes.min() < 0 or row.min() < 0 or row.max() >= len(joined):
            raise ValueError(f"accepted_features: expected rows of 0 … {len(joined) - 1}, got {row.tolist()}")
        features[s, : len(row)] = joined[row]
        stream[s, : len(row)], position[s, : len(row)] = s, prefix_len[s] + np.arange(len(row))
    return features.reshape(num_streams * num_places, -1), stream.ravel(), position.ravel()
