"""sample: random choice of a token, by noise that depends on nothing but seed, position and token id."""

from __future__ import annotations

import numpy as np

from kdtree_nb.config import MAX_TOP_K


def philox(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Philox4x32-10 (Salmon et al. 2011): a block cipher as a random number generator, u32 [..., 4] -> u32 [..., 4]."""
    x = [counter[..., i].astype(np.uint64) for i in range(4)]
    low = np.uint64(0xFFFFFFFF)
    for turn in range(10):
        product0, product1 = x[0] * np.uint64(0xD2511F53), x[2] * np.uint64(0xCD9E8D57)
        key0 = np.uint64((key[0] + turn * 0x9E3779B9) % 2**32)
        key1 = np.uint64((key[1] + turn * 0xBB67AE85) % 2**32)
        x = [product1 >> 32 ^ x[1] ^ key0, product1 & low, product0 >> 32 ^ x[3] ^ key1, product0 & low]
    return np.stack(x, axis=-1).astype(np.uint32)


def gumbel_noise(seed: int, position: int, vocab_size: int) -> np.ndarray:
    """Independent draws of the standard Gumbel distribution, one per token id at an absolute position: f64 [V].

    Token v takes word v % 4 of the generator's block v // 4 under the seed: w, of 32 bits. u = (w + 1/2) / 2^32, so the
    noise -ln(-ln u) has 2^32 values from -3.13 to 22.87: what is 2^33 times less likely than another is never chosen.
    """
    counter = np.zeros((-(-vocab_size // 4), 4), np.uint32)
    counter[:, 0], counter[:, 1] = np.arange(len(counter)), position
    words = philox(counter, (seed % 2**32, seed % 2**64 >> 32)).reshape(-1)[:vocab_size]
    return -np.log(-np.log((words + 0.5) / 2**32))


def kept_tokens(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Ids among which top_k and top_p let chance decide, the most likely first, the lower id on ties: [V] -> i64 [n].

    top_k 0 keeps all. top_p below 1 keeps the fewest of the top_k (0: 1024) most likely whose probabilities at the
    temperature, among these, add up to top_p; at least one.
    """
    ids = np.argsort(-logits, kind="stable")
    num_kept = top_k or (MAX_TOP_K if top_p < 1 else len(ids))
    ids = ids[:num_kept]
    if top_p == 1:
        return ids
    mass = np.exp(_scaled(logits, temperature)[ids]).cumsum()
    return ids[: 1 + np.count_nonzero(mass < top_p * mass[-1])]


def sample(
    logits: np.ndarray, stream: np.ndarray, position: np.ndarray, temperature: np.ndarray, top_k: np.ndarray,
    top_p: np.ndarray, seed: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """One token per row: logits [T, V], stream and position i32 [T], parameters per stream [S] -> i64 [T].

    The token after a row at `position` is the kept one of largest logit / temperature + gumbel_noise at position + 1,
    and so a draw from the softmax at that temperature over the kept tokens. Temperature 0: the argmax. 0 for a row of
    nothing but -inf, -1 for a row with a NaN.
    """
    token = np.empty(len(logits), np.int64)
    for t, s in enumerate(stream):
        row = np.asarray(logits[t], np.float64)
        if np.isnan(row).any():
            token[t] = -1
        elif temperature[s] == 0 or np.isneginf(row).all():
            token[t] = row.argmax()
        else:
            ids = np.sort(kept_tokens(row, temperature[s], int(top_k[s]), float(top_p[s])))
            noise = gumbel_noise(int(seed[s]), int(position[t]) + 1, len(row))
            token[t] = ids[np.argmax((_scaled(row, temperature[s]) + noise)[ids])]
    return token


def _scaled(logits: np.ndarray, temperature: float) -> np.ndarray:
    """(logit - largest) / temperature, where an infinite largest logit is as far from itself as any: 0."""
    largest = logits.max()
    with np.errstate(invalid="ignore", over="ignore"):
        return np.where(logits == largest, 0.0, (logits - largest) / float(temperature))
