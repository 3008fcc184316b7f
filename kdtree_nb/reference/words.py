"""Words: what ranks tell each other about their parts of a vocabulary, and the two operations that work on them."""

from __future__ import annotations

import numpy as np

from kdtree_nb.config import NUM_SEGMENTS
from kdtree_nb.reference.sample import sample

NO_WORD, NAN_WORD = np.iinfo(np.int64).min, np.iinfo(np.int64).max
_LOW = 2**32 - 1


def words_of(logits: np.ndarray, token_id: np.ndarray) -> np.ndarray:
    """Integers i64 that order like (logit, -id): f32 and ids of one shape. A float's bits rise with it if it is
    positive and fall if it is negative, so those of negative ones are turned round."""
    bits = (np.asarray(logits, np.float32) + np.float32(0)).view(np.int32).astype(np.int64)  # -0 becomes +0
    rising = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return rising * 2**32 + (_LOW - token_id)


def tokens_of(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The logits f32 and ids i64 of words."""
    rising = words >> 32
    bits = np.where(rising < 0, rising ^ 0x7FFFFFFF, rising).astype(np.int32)
    return bits.view(np.float32), _LOW - (words & _LOW)


def segment_words(largest: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Largest logit and sum of exp(logit - largest) of vocabulary segments, both f32, side by side in an i64."""
    high, low = (np.asarray(x, np.float32).view(np.uint32).astype(np.uint64) for x in (largest, total))
    return (high << np.uint64(32) | low).view(np.int64)


def draft_topk_merge(words: np.ndarray, num_candidates: int) -> tuple[np.ndarray, np.ndarray]:
    """Log-softmax of the K best of all ranks' candidates: words [P, T, K + 8/P] -> log_probs f32 and ids, [T, K].

    Each rank's words are its K best candidates and then its segments. Raises ValueError for a NaN.
    """
    candidates, segments = np.split(words, [num_candidates], axis=-1)
    candidates, segments = (np.concatenate(list(part), axis=-1) for part in (candidates, segments))
    if segments.shape[-1] != NUM_SEGMENTS:
        raise ValueError(f"draft_topk_merge: expected {NUM_SEGMENTS} segments, got {segments.shape[-1]}")
    bits = (
        np.ascontiguousarray(segments).view(np.uint32).reshape(*segments.shape, 2).view(np.float32).astype(np.float64)
    )
    total, largest = bits[..., 0], bits[..., 1]
    if np.isnan(largest).any():
        raise ValueError("draft_topk_merge: expected logits that are finite or -inf, got NaN or +inf")
    highest = np.maximum(largest.max(-1, keepdims=True), np.finfo(np.float64).min)
    with np.errstate(divide="ignore"):
        log_sum = np.log((total * np.exp(largest - highest)).sum(-1, keepdims=True))
    logits, ids = tokens_of(-np.sort(-candidates, axis=-1)[..., :num_candidates])
    with np.errstate(invalid="ignore"):
        log_probs = logits - highest - log_sum
    log_probs[np.isneginf(logits)] = -np.inf
    return log_probs.astype(np.float32), ids


def sample_among(
    words: np.ndarray, largest: np.ndarray, stream: np.ndarray, position: np.ndarray, temperature: np.ndarray,
    top_k: np.ndarray, top_p: np.ndarray, seed: np.ndarray, vocab_size: int,
) -> np.ndarray:  # fmt: skip
    """`sample` where only the tokens of a row's words [T, M] may be chosen; the chosen words i64 [T].

    The row's largest logit must be among them where top_p is below 1: the other tokens count as impossible.
    """
    chosen = np.empty(len(words), np.int64)
    for t, row in enumerate(words):
        row = row[row != NO_WORD]
        if (row == NAN_WORD).any() or np.isnan(largest[t]):
            chosen[t] = NAN_WORD
            continue
        logits, ids = tokens_of(row)
        dense = np.full((1, vocab_size), -np.inf, np.float32)
        dense[0, ids] = logits
        by = (stream[t : t + 1], position[t : t + 1], temperature, top_k, top_p, seed)
        token = sample(dense, *by)[0]
        chosen[t] = words_of(dense[0, token : token + 1], np.array([token]))[0]
    return chosen
