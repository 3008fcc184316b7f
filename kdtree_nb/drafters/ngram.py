"""NGram: prompt lookup. What followed the last occurrences of the current suffix will probably follow again."""

from __future__ import annotations

import math

import torch

from kdtree_nb.drafters.base import DraftCandidates, DraftContext, check_depth

_RECENCY = 0.5
"""Vote of a match relative to the next more recent one."""

_AGREEMENT = 0.9
"""Probability given to the candidates of one depth together."""


class SuffixIndex:
    """Where each n-gram (min_n … max_n tokens) of one growing list ended before. Adding a token costs O(max_n)."""

    def __init__(self, tokens: list[int], min_n: int, max_n: int) -> None:
        self.tokens = tokens
        self.num_indexed = 0
        self.lengths = range(max_n, min_n - 1, -1)
        self.ends: dict[tuple[int, ...], list[int]] = {}

    def covers(self, tokens: list[int]) -> bool:
        """Whether `tokens` is the list that was indexed, perhaps grown since."""
        return tokens is self.tokens and len(tokens) >= self.num_indexed

    def update(self) -> None:
        """Index the n-grams that have got a following token since the last call."""
        tokens, ends = self.tokens, self.ends
        for end in range(max(self.num_indexed, 1), len(tokens)):
            for n in self.lengths:
                if n <= end:
                    ends.setdefault(tuple(tokens[end - n : end]), []).append(end)
        self.num_indexed = len(tokens)

    def lookup(self, num_matches: int) -> list[int]:
        """Ends of the most recent earlier occurrences of the longest suffix that has any, most recent first."""
        tokens, length = self.tokens, len(self.tokens)
        for n in self.lengths:
            found = self.ends.get(tuple(tokens[length - n :])) if n <= length else None
            if found:
                return found[: -num_matches - 1 : -1]
        return []

    def match_length(self, end: int, limit: int) -> int:
        """How many tokens before `end` equal the suffix of the list, counted up to `limit`."""
        tokens, last = self.tokens, len(self.tokens)
        limit = min(limit, end)
        n = 0
        while n < limit and tokens[end - 1 - n] == tokens[last - 1 - n]:
            n += 1
        return n

    def continuation(self, end: int, depth: int) -> list[int]:
        """The `depth` tokens that followed `end`; past the end of the list the copy goes on from itself."""
        copied = self.tokens[end : end + depth]
        period = len(copied)
        while len(copied) < depth:
            copied.append(copied[-period])
        return copied


class NGram:
    """Prompt lookup over the committed tokens of each stream.

    The longest suffix of max_n … min_n tokens that occurred before is looked up; the continuations of its `num_matches`
    most recent occurrences vote, recent ones more. The draft is never deeper than the match is long: a short match
    predicts little, and each drafted token costs a row of the target's forward. No match: nothing is drafted.
    """

    def __init__(self, max_n: int = 4, depth: int = 8, min_n: int = 2, num_matches: int = 3) -> None:
        if not 1 <= min_n <= max_n:
            raise ValueError(f"NGram: expected 1 <= min_n <= max_n, got min_n {min_n}, max_n {max_n}")
        if num_matches < 1:
            raise ValueError(f"NGram: expected num_matches of at least 1, got {num_matches}")
        self.depth = check_depth("NGram", depth)
        self.max_n = max_n
        self.min_n = min_n
        self.num_matches = num_matches
        self._indexes: dict[int, SuffixIndex] = {}

    def draft(self, context: DraftContext) -> DraftCandidates:
        """Candidates voted for by earlier occurrences; L = 0 when no stream has any."""
        votes = [self._votes(s, tokens) for s, tokens in zip(context.stream_ids, context.tokens, strict=True)]
        depth = max(map(len, votes))
        width = min(max((len(level) for stream in votes for level in stream), default=0), context.num_candidates)
        log_probs, token_ids = [], []
        for stream in votes:
            levels = [_fill(level, width) for level in stream]
            levels += [_fill({}, width)] * (depth - len(stream))
            log_probs.append([[p for _, p in level] for level in levels])
            token_ids.append([[t for t, _ in level] for level in levels])
        shape = (len(votes), depth, width)
        return DraftCandidates(
            torch.tensor(log_probs, dtype=torch.float32, device=context.device).view(shape),
            torch.tensor(token_ids, dtype=torch.int64, device=context.device).view(shape),
        )

    def _votes(self, stream: int, tokens: list[int]) -> list[dict[int, float]]:
        """Per depth, the weight of each token that followed a match."""
        index = self._indexes.get(stream)
        if index is None or not index.covers(tokens):
            index = self._indexes[stream] = SuffixIndex(tokens, self.min_n, self.max_n)
        index.update()
        votes: list[dict[int, float]] = []
        weight = 1.0
        for end in index.lookup(self.num_matches):
            depth = index.match_length(end, self.depth)
            for level, token in enumerate(index.continuation(end, depth)):
                if level == len(votes):
                    votes.append({})
                votes[level][token] = votes[level].get(token, 0.0) + weight
            weight *= _RECENCY
        return votes


def _fill(level: dict[int, float], width: int) -> list[tuple[int, float]]:
    """The `width` heaviest (token, log-prob) pairs, padded with distinct tokens of log-prob -inf."""
    total = sum(level.values())
    best = sorted(level.items(), key=lambda item: (-item[1], item[0]))[:width]
    pairs = [(token, math.log(_AGREEMENT * weight / total)) for token, weight in best]
    spare = 0
    while len(pairs) < width:
        if spare not in level:
            pairs.append((spare, -math.inf))
        spare += 1
    return pairs
