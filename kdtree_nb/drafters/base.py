"""The Drafter protocol: committed tokens in, per-depth candidates (or a ready tree) out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from kdtree_nb.model import Model
from kdtree_nb.model.ranks import Ranks
from kdtree_nb.native.ops import StreamState
from kdtree_nb.tree import DraftTree


@dataclasses.dataclass(frozen=True, slots=True)
class DraftContext:
    """What a drafter may look at. The B streams are those still being decoded; a drafter must not change anything here.

    tokens:            per stream, the prompt and everything emitted; the last one is the bonus token, the tree's root
    stream_ids:        per stream, its seat in the batch: of several prompts its index; free again when it has finished
    num_prompt_tokens: per stream, how many of `tokens` are the prompt
    num_candidates:    candidates per depth that the tree can use, min(max_budget, vocab_size); fewer may be returned
    """

    tokens: list[list[int]]
    stream_ids: list[int]
    num_prompt_tokens: list[int]
    num_candidates: int
    vocab_size: int
    device: torch.device


class DraftCandidates(NamedTuple):
    """Per stream and depth d = 1 … L the K likeliest tokens. L and K may be 0; a token of log-prob -inf is never taken.

    log_probs: f32 [B, L, K]  not above 0, not increasing along K
    token_ids: i64 [B, L, K]  distinct along K
    """

    log_probs: torch.Tensor
    token_ids: torch.Tensor


@runtime_checkable
class Drafter(Protocol):
    """Anything with a greatest depth and a `draft` method."""

    depth: int

    def draft(self, context: DraftContext) -> DraftCandidates | DraftTree:
        """Candidates for the B streams of `context`, or B ready trees whose roots are the bonus tokens."""
        ...


@runtime_checkable
class DeviceDrafter(Protocol):
    """A drafter that can also draft from what lies on the device, so that a whole step needs no host."""

    depth: int

    def draft(self, context: DraftContext) -> DraftCandidates | DraftTree:
        """As a Drafter: the same drafts as `draft_on_device`."""
        ...

    def draft_on_device(self, state: StreamState) -> torch.Tensor:
        """Logits f32 or bf16 [S, depth, V] of the tokens at depths 1 … depth, for all S streams of `state`.

        Of several ranks each may give those of its part of the vocabulary instead, as the model's head does. It is
        captured: it must not look at values, only launch work on the device of `state`, the same every time. The rows
        of a stream that is not active are not used.
        """
        ...


@runtime_checkable
class AttachedDrafter(Protocol):
    """A drafter that remembers the target's hidden states of the committed tokens of S streams; also a Drafter, and
    where it can draft on the device a DeviceDrafter.

    feature_layers: the target's layers whose outputs it wants
    """

    depth: int
    feature_layers: tuple[int, ...]

    def draft(self, context: DraftContext) -> DraftCandidates | DraftTree:
        """As a Drafter. All tokens of a stream but its last one have been given to `remember` by then."""
        ...

    def remember(self, features: torch.Tensor, stream: torch.Tensor, position: torch.Tensor) -> None:
        """Float [T, nD]: the hidden states after each of the n feature layers, side by side, of T committed tokens.

        stream, position: i32 [T], where the tokens stand. A position of -1 says that there is no token: anything may
        then be in the other values. It is captured, as `draft_on_device` is. A position may come again in a later text.
        """
        ...


@runtime_checkable
class FeatureDrafter(Protocol):
    """A drafter that looks at the target's hidden states. It drafts through what it attaches to a batch."""

    depth: int

    def attach(self, model: Model, num_streams: int, num_slots: int) -> AttachedDrafter:
        """What drafts for `num_streams` streams of at most `num_slots` tokens, which `model` decodes.

        It is kept from one text to the next. Raises ValueError where the drafter was not made for such a model.
        """
        ...


AnyDrafter = Drafter | FeatureDrafter
"""What an engine takes."""


class StreamDraft(NamedTuple):
    """One stream's candidates: log_probs f32 [L, K] and token_ids i64 [L, K], as numpy arrays."""

    log_probs: np.ndarray
    token_ids: np.ndarray


def stack(drafts: Sequence[StreamDraft], device: torch.device) -> DraftCandidates:
    """Pad the streams' drafts to a common depth and width with -inf, and put them on `device`."""
    depth = max((d.log_probs.shape[0] for d in drafts), default=0)
    width = max((d.log_probs.shape[1] for d in drafts), default=0)
    log_probs = np.full((len(drafts), depth, width), -np.inf, dtype=np.float32)
    token_ids = np.tile(np.arange(width), (len(drafts), depth, 1))
    for row, draft in enumerate(drafts):
        num_depths, num_candidates = draft.log_probs.shape
        log_probs[row, :num_depths, :num_candidates] = draft.log_probs
        for level, ids in enumerate(draft.token_ids):
            token_ids[row, level] = ids if num_candidates == width else _with_fillers(ids, width)
    return DraftCandidates(torch.from_numpy(log_probs).to(device), torch.from_numpy(token_ids).to(device))


def _with_fillers(ids: np.ndarray, width: int) -> np.ndarray:
    unused = np.setdiff1d(np.arange(width), ids)
    return np.concatenate([ids, unused])[:width]


def likeliest(ranks: Ranks, logits: torch.Tensor, vocab_size: int, num_candidates: int) -> DraftCandidates:
    """`draft_topk` of logits [B, L, V], or of this rank's part.

    A row that holds a NaN or +inf has NaN log-probs, as the operation gives them on a GPU. On a CPU it would refuse the
    rows of all streams for it, and still does on several ranks, of which none sees the others' logits.
    """
    try:
        return DraftCandidates(*ranks.draft_topk(logits, vocab_size, num_candidates))
    except ValueError:
        if logits.is_cuda or ranks.num_ranks > 1:
            raise
        is_bad = ~(logits.amax(2, keepdim=True) < torch.inf)
        if not is_bad.any():
            raise
        log_probs, token_ids = ranks.draft_topk(logits.masked_fill(is_bad, 0), vocab_size, num_candidates)
        return DraftCandidates(log_probs.masked_fill(is_bad, torch.nan), token_ids)


def check_depth(name: str, depth: int) -> int:
    """`depth` itself. Raises ValueError unless it is a positive integer."""
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise ValueError(f"{name}: expected a depth of at least 1, got {depth!r}")
    return depth


def as_continuations(name: str, continuations: Sequence[int] | Sequence[Sequence[int]]) -> list[list[int]]:
    """One list per stream. A flat list of ids is the continuation of a single stream. Raises ValueError for none."""
    if len(continuations) == 0:
        raise ValueError(f"{name}: expected the tokens that the target will emit, got none")
    if isinstance(continuations[0], (int, np.integer)):
        return [[int(t) for t in continuations]]
    return [[int(t) for t in stream] for stream in continuations]


def upcoming(name: str, context: DraftContext, row: int, continuations: list[list[int]], depth: int) -> list[int]:
    """The next at most `depth` tokens that the target will emit on the stream in `row`. Raises ValueError where there
    is no continuation for it."""
    stream = context.stream_ids[row]
    if stream >= len(continuations):
        raise ValueError(f"{name}: expected a continuation for stream {stream}, got {len(continuations)} continuations")
    num_emitted = len(context.tokens[row]) - context.num_prompt_tokens[row]
    return continuations[stream][num_emitted : num_emitted + depth]
