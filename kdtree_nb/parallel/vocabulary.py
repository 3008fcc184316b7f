"""Choices over a vocabulary that is split over ranks: a logit and its id as one number that can be exchanged and
compared. A word is an i64: above, the logit's bits, made to rise as the logit does; below, 2^32 - 1 - id."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kdtree_nb.model.ranks import SampleBy
from kdtree_nb.native import ops

_LOW = (1 << 32) - 1
_NAN, _NONE = (1 << 63) - 1, -(1 << 63)
"""The word of a NaN, larger than any other, and the one that stands for no token."""


def words_of(logits: Tensor, token_id: Tensor) -> Tensor:
    """Words of logits f32 and ids i64 of one shape: larger for a larger logit, and of equal ones for the lower id."""
    bits = (logits + 0.0).view(torch.int32)  # +0 and -0 are equal logits
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (rising.long() << 32) | (_LOW - token_id)


def best_words(logits: Tensor, token: Tensor, begin: int) -> Tensor:
    """The words of the chosen tokens i64 [T] of logits f32 [T, V'], whose first id is `begin`; -1 stands for a NaN."""
    place = token.clamp(0, logits.shape[1] - 1)
    words = words_of(logits.gather(1, place.unsqueeze(1)).squeeze(1), place + begin)
    return words.masked_fill_(token < 0, _NAN)


def token_of(words: Tensor) -> Tensor:
    """The ids; -1 for the word of a NaN."""
    return (_LOW - (words & _LOW)).masked_fill_(words == _NAN, -1)


def logit_of(words: Tensor) -> Tensor:
    """The logits f32; a NaN for the word of a NaN."""
    rising = (words >> 32).int()
    return (rising ^ ((rising >> 31) & 0x7FFFFFFF)).view(torch.float32)


def all_words(logits: Tensor, begin: int) -> Tensor:
    """The words of logits f32 [T, V'], whose first id is `begin`: i64 [T, V']."""
    ids = torch.arange(begin, begin + logits.shape[1], device=logits.device)
    return words_of(logits, ids).masked_fill_(logits.isnan(), _NAN)


def candidates(words: Tensor, largest: Tensor, by: SampleBy, vocab_size: int, num_rows: Tensor | None) -> Tensor:
    """Of this rank's words [T, V'] those that a draw over all ranks can choose: [T, 1 + max_kept].

    The word that would be drawn of these alone, for streams that keep all tokens; the max_kept largest, for the others.
    """
    everything = by._replace(top_k=torch.zeros_like(by.top_k), top_p=torch.ones_like(by.top_p))
    drawn = ops.sample_among(words, largest, *everything[:-1], vocab_size, num_rows).unsqueeze(1)
    if by.max_kept == 0:
        return drawn
    num_kept = min(by.max_kept, words.shape[1])
    best = pad(words.topk(num_kept, 1).values, (0, by.max_kept - num_kept), value=_NONE)
    keeps_all = _keeps_all(by, vocab_size)[by.stream.clamp(min=0).long()].unsqueeze(1)
    return torch.cat([drawn.masked_fill(~keeps_all, _NONE), best.masked_fill(keeps_all, _NONE)], 1)


def _keeps_all(by: SampleBy, vocab_size: int) -> Tensor:
    """Per stream whether all tokens take part: bool [S]."""
    return (by.top_p == 1) & ((by.top_k == 0) | (by.top_k >= vocab_size))
