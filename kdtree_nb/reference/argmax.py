"""argmax: greedy choice of a token."""

from __future__ import annotations

import numpy as np


def argmax(logits: np.ndarray) -> np.ndarray:
    """Id of the largest logit of each row, the lower id on ties, -1 for a row with a NaN: [T, V] -> i64 [T]."""
    return np.where(np.isnan(logits).any(axis=-1), -1, np.argmax(logits, axis=-1))
