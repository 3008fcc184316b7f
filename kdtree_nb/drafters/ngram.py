"""NGram: prompt lookup. What followed the last occurrences of the current suffix will probably follow again."""

from __future__ import annotations

import math
from collections import defaultdict

import torch

from kdtree_nb.drafters.base import DraftCandidates, DraftContext, check_depth

Level = list[tuple[int, float]]
"""Candidates of one depth, (token, log-prob), best first."""

Voter = tuple[list[int], int, float]
"""How an earlier occurrence went on, how many tokens before it match, and the weight of each."""

_RECENCY = 0.5
"""Weight of a match relative to the next more recent one."""

_LONGEST = 64
"""Tokens up to which a match is measured."""

_OTHER = 1.0
"""Votes for whatever no match proposes, against one for each token of the most recent match."""

_MIN_SHARE = 0.4
"""Share of the votes below which a token that is not the favourite is left out: a row of the target costs more."""


class SuffixIndex:
    """Where each n-gram (min_n … max_n tokens) of one growing list ended before. Adding a token costs O(max_n)."""

    def __init__(self, tokens: list[int], min_n: int, max_n: int) -> None:
        self.tokens = tokens
        self.num_indexed = 0
        self.lengths = range(max_n, min_n - 1, -1)
        self.ends: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)

    def covers(self, tokens: list[int]) -> bool:
        """Whether `tokens` is the list that was indexed, perhaps grown since."""
        return tokens is self.tokens and len(tokens) >= self.num_indexed

    def update(self) -> None:
        """Index the n-grams that have got a following token since the last call."""
        tokens, ends = self.tokens, self.ends
        for end in range(max(self.num_indexed, 1), len(tokens)):
            for n in self.lengths:
                if n <= end:
                    ends[tuple(tokens[end - n : end])].append(end)
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
        if tokens[end - limit : end] == tokens[last - limit :]:
            return limit
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

    The longest suffix of max_n … min_n tokens that occurred before is looked up. At every depth the continuations of
    its `num_matches` most recent occurrences vote, recent and long ones more; those that lose leave. None reaches
    deeper than its match is long: a short match predicts little, and a drafted token costs a row of the target. No
    match: no draft.

    The probability of a token is its share of the votes, one for each token of a match so far (an older one's weigh
    less) and one more for anything else. A match that held for n tokens so goes on with n / (n + 1), Laplace's rule of
    succession. It depends on nothing but the stream's tokens.
    """

    def __init__(self, max_n: int = 6, depth: int = 16, min_n: int = 1, num_matches: int = 4) -> None:
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
        streams = [self._levels(s, tokens) for s, tokens in zip(context.stream_ids, context.tokens, strict=True)]
        depth = max(map(len, streams))
        width = min(max((len(level) for levels in streams for level in levels), default=0), context.num_candidates)
        padded = [pair for levels in streams for pair in _pad(levels, depth, width)]
        shape = (len(streams), depth, width)
        return DraftCandidates(
            torch.tensor([p for _, p in padded], dtype=torch.float32, device=context.device).view(shape),
            torch.tensor([t for t, _ in padded], dtype=torch.int64, device=context.device).view(shape),
        )

    def _levels(self, stream: int, tokens: list[int]) -> list[Level]:
        index = self._indexes.get(stream)
        if index is None or not index.covers(tokens):
            index = self._indexes[stream] = SuffixIndex(tokens, self.min_n, self.max_n)
        index.update()
        voters: list[Voter] = []
        for age, end in enumerate(index.lookup(self.num_matches)):
            length = index.match_length(end, _LONGEST)
            voters.append((index.continuation(end, min(length, self.depth)), length, _RECENCY**age))
        return _count(voters)


def _count(voters: list[Voter]) -> list[Level]:
    """Per depth the favourite and its strong rivals, by the voters that agreed on all favourites so far."""
    levels: list[Level] = []
    while voters:
        depth, end = len(levels), min(len(text) for text, _, _ in voters)
        common = voters[0][0][depth:end]
        if all(text[depth:end] == common for text, _, _ in voters):
            for more, token in enumerate(common, start=depth):
                count = sum([weight * (length + more) for _, length, weight in voters])
                levels.append([(token, _log_share(count, count))])
        else:
            votes: defaultdict[int, float] = defaultdict(float)
            for text, length, weight in voters:
                votes[text[depth]] += weight * (length + depth)
            levels.append(_elect(votes))
            voters = [voter for voter in voters if voter[0][depth] == levels[-1][0][0]]
        voters = [voter for voter in voters if len(voter[0]) > len(levels)]
    return levels


def _elect(votes: dict[int, float]) -> Level:
    """The favourite, and rivals with a share of at least _MIN_SHARE."""
    total = sum(votes.values())
    favourite, *rivals = sorted(votes.items(), key=lambda item: -item[1])
    strong = [rival for rival in rivals if rival[1] >= _MIN_SHARE * total]
    return [(token, _log_share(count, total)) for token, count in [favourite, *strong]]


def _log_share(votes: float, total: float) -> float:
    return math.log(votes / (total + _OTHER))


def _pad(levels: list[Level], depth: int, width: int) -> Level:
    """depth * width pairs: every level cut or filled up to `width` with distinct tokens of log-prob -inf."""
    pairs: Level = []
    for level in levels:
        pairs += level[:width]
        if len(level) < width:
            drafted = [token for token, _ in level]
            unused = (token for token in range(width) if token not in drafted)
            pairs += [(token, -math.inf) for token, _ in zip(unused, range(width - len(level)), strict=False)]
    return pairs + [(token, -math.inf) for token in range(width)] * (depth - len(levels))
