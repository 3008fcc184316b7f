"""step_commit: what a verified step emits, and the state that the next step starts from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Streams(NamedTuple):
    """Where S streams stand. `step_commit` changes the arrays."""

    prefix_len: np.ndarray  # i32 [S] tokens whose rows the cache holds
    bonus: np.ndarray  # i64 [S] the last committed token
    remaining: np.ndarray  # i32 [S] tokens that may still be emitted
    active: np.ndarray  # i32 [S] 1 or 0
    text: np.ndarray  # i64 [S, P] committed tokens; text[s, prefix_len[s]] is the bonus token


def step_commit(
    state: Streams, paths: Sequence[Sequence[int]], num_nodes: Sequence[int], choices: Sequence[Sequence[int]],
    stop_tokens: set[int],
) -> list[tuple[list[int], int]]:  # fmt: skip
    """Per stream the emitted tokens and a status: 0, 1 (an active stream without a tree), 2 (a choice of -1: NaN).

    paths: accepted node indices, root excluded. choices: the target's token after each node. An active stream emits the
    choices after the root and the accepted nodes, up to a stop token, the last remaining one, or a NaN; each ends it.
    """
    results = []
    for s, (path, count, choice) in enumerate(zip(paths, num_nodes, choices, strict=True)):
        emitted: list[int] = []
        if not state.active[s] or count == 0:
            results.append((emitted, int(state.active[s])))
            state.active[s] = 0
            continue
        wanted = [int(choice[node]) for node in (0, *path)][: state.remaining[s]]
        ends = [j for j, token in enumerate(wanted) if token < 0 or token in stop_tokens]
        if ends:
            wanted = wanted[: ends[0] + 1]
        is_nan = wanted[-1] < 0
        emitted = wanted[:-1] if is_nan else wanted
        start = state.prefix_len[s] + 1
        state.text[s, start : start + len(emitted)] = emitted
        state.prefix_len[s] += len(emitted)
        state.remaining[s] -= len(emitted)
        state.bonus[s] = state.text[s, state.prefix_len[s]]
        state.active[s] = not ends and state.remaining[s] > 0
        results.append((emitted, 2 if is_nan else 0))
    return results
