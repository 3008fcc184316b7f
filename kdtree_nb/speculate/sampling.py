"""Sampling: how a stream's tokens are drawn, and the choice of the token after every row."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kdtree_nb.config import MAX_TOP_K
from kdtree_nb.model import Model
from kdtree_nb.model.ranks import SampleBy
from kdtree_nb.native import ops
from kdtree_nb.native.devices import put

MIN_TEMPERATURE = 2.0**-126
"""Smallest temperature that samples: its reciprocal must be finite in FP32."""


def _require(condition: bool, name: str, expected: str, got: Any) -> None:
    if not condition:
        raise ValueError(f"Sampling: {name}: expected {expected}, got {got!r}")


def _float32(value: Any) -> float:
    """`value` rounded to FP32, NaN for what is no number and for integers beyond all floats."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return math.nan
    if isinstance(value, int) and abs(value) >= 2**128:
        return math.nan
    return torch.tensor(float(value), dtype=torch.float32, device="cpu").item()


def _is_integer(value: Any, largest: int) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and 0 <= value <= largest


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Draw each token from softmax(logits / temperature), over the most likely tokens.

    temperature: 0 is greedy; 1 is the model's own distribution
    top_k:       keep the most likely top_k tokens, 1 … 1024; 0 keeps all
    top_p:       of those (of 1024 where top_k is 0) keep the fewest whose probabilities add up to top_p; 1 keeps all
    seed:        0 … 2^63 - 1. The same seed gives the same text, with or without a drafter, alone or in a batch

    Chance enters as noise that is a function of (seed, position in the text, token id): see `kdtree_nb.ops.sample`.
    Two streams of one seed have the same noise; give each its own. Raises ValueError on anything out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        temperature, top_p = _float32(self.temperature), _float32(self.top_p)
        is_good = temperature == 0 == self.temperature or MIN_TEMPERATURE <= temperature < math.inf
        _require(is_good, "temperature", "0 (greedy) or a finite FP32 number of at least 2^-126", self.temperature)
        _require(_is_integer(self.top_k, MAX_TOP_K), "top_k", f"an integer of 0 (all) … {MAX_TOP_K}", self.top_k)
        _require(0 < top_p <= 1 and self.top_p <= 1, "top_p", "a number above 0 and at most 1", self.top_p)
        _require(_is_integer(self.seed, 2**63 - 1), "seed", "an integer of 0 … 2^63 - 1", self.seed)

    def num_kept(self, vocab_size: int) -> int:
        """The most tokens that take part in a draw; 0 where all do."""
        is_cut = _float32(self.top_p) < 1
        wanted = self.top_k or (MAX_TOP_K if is_cut else 0)
        return min(wanted, vocab_size) if is_cut or wanted < vocab_size else 0


GREEDY = Sampling(temperature=0.0)

Choose = Callable[[torch.Tensor, ops.Rows], torch.Tensor]
"""From logits f32 [T, V] and their rows to the token i64 [T] after each; -1 for a row with a NaN."""


def check_samplings(sampling: Any, num_streams: int) -> list[Sampling]:
    """One Sampling per stream; None is greedy. Raises ValueError on other types and another number of them."""
    values = [sampling] * num_streams if sampling is None or isinstance(sampling, Sampling) else sampling
    if not isinstance(values, Sequence) or not all(value is None or isinstance(value, Sampling) for value in values):
        raise ValueError(f"sampling: expected a Sampling, or one (or None) for each stream, got {sampling!r}")
    if len(values) != num_streams:
        raise ValueError(f"sampling: expected one, or one for each of {num_streams} streams, got {len(values)}")
    return [GREEDY if value is None else value for value in values]


class Chooser:
    """A `Choose` by the parameters of S streams: greedy where no stream samples. Several ranks choose together.

    The parameters lie on the device, so that a captured choice takes those of the next text.
    """

    def __init__(self, num_streams: int, model: Model) -> None:
        self.is_greedy, self._max_kept = True, 0
        self._ranks, self._vocab_size = model.ranks, model.config.vocab_size
        self._parameters = [
            torch.zeros(num_streams, dtype=dtype, device=model.device)
            for dtype in (torch.float32, torch.int32, torch.float32, torch.int64)
        ]

    def set(self, samplings: list[Sampling]) -> None:
        """Choose as `samplings` say from now on, one for each stream."""
        self.is_greedy = all(sampling.temperature == 0 for sampling in samplings)
        self._max_kept = max(sampling.num_kept(self._vocab_size) for sampling in samplings)
        columns = zip(*(dataclasses.astuple(sampling) for sampling in samplings), strict=True)
        for tensor, column in zip(self._parameters, columns, strict=True):
            put(tensor, column)

    @property
    def kind(self) -> tuple[bool, int]:
        """What a captured choice is made for: greedy or not and, of several ranks, how many tokens each names."""
        return self.is_greedy, 0 if self._ranks.num_ranks == 1 else self._max_kept

    def __call__(self, logits: torch.Tensor, rows: ops.Rows) -> torch.Tensor:
        if self.is_greedy:
            return self._ranks.argmax(logits, self._vocab_size, rows.num_rows)
        by = SampleBy(rows.stream, rows.position, *self._parameters, self._max_kept)
        return self._ranks.sample(logits, self._vocab_size, by, rows.num_rows)
