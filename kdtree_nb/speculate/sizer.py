"""Sizer: how large a captured step to launch next, from what the trees of earlier steps held.

The host launches steps ahead of the records it reads, so it cannot know the tree of the step that it launches. But the
mean over the last trees says nearly as much: in which step a node is likely changes quickly, how many likely nodes a
step has does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kdtree_nb.speculate.cut import Cutter, cut_on_host

MEMORY = 16
"""Samples over which the estimates are averaged, roughly."""

SAMPLE_EVERY = 4
"""Steps from one whose tree is looked at to the next."""

EXPLORE_EVERY = 64
"""Steps after which one of the next size is taken, if that could be better for all that is known; where nothing is
drafted, one that drafts, to see whether it would pay by now."""

SWITCH_GAIN = 1.01
"""How much better another size must be. It may have to be captured, and estimates are noisy."""

MAX_SCALE = 4.0
"""How much likelier than known so far the nodes behind a tree are taken to be at most."""


class Size(NamedTuple):
    """A captured step: tree slots per stream, the root's included, and whether the step itself cuts its trees."""

    num_slots: int
    is_cut: bool = False


class Sizer:
    """Chooses among captured steps the one that emits the most tokens per second.

    What a node brings is its probability; `mean` over streams and steps, by node. Trees are nested, so one of N nodes
    tells this of all smaller ones; behind its end, nodes are taken to be as much likelier or less likely than known so
    far as those of its second half were. Cutting pays where rows are dear and trees differ: by how much is seen by
    cutting the trees that are looked at.

    cutters: by tree slots per stream, of steps that cut; of 1 slot, of steps that draft nothing
    cut_s:   by slots, the seconds of those steps that cutting takes
    typical: f64 [nodes], the mean to begin with; without one the first steps are of the largest size, and cut
    """

    def __init__(
        self, cutters: Mapping[int, Cutter], cut_s: Mapping[int, float], typical: Sequence[float] = ()
    ) -> None:  # fmt: skip
        self.cutters, self.cut_s, self.sizes = cutters, cut_s, sorted(cutters)
        self.mean, self.is_there = (np.zeros(self.sizes[-1]) for _ in range(2))
        self.mean[: len(typical)] = typical[: self.sizes[-1]]
        self.is_there[self.mean > 0] = 1.0
        self.num_samples = 0
        self._begin_weight = MEMORY // 2 if len(typical) else 0
        self._age, self._ends = np.ones(self.sizes[-1]), np.array(self.sizes) - 1
        self._gain = dict.fromkeys(self.sizes, 1.0)
        self._current = Size(self.sizes[-1], self.sizes[-1] > 1)
        self._chosen_for: tuple[int, int, int] | None = None
        self._num_steps = 0

    def choose(self, num_active: int, prefix_len: float) -> tuple[Size, bool]:
        """The size of the next step, and whether its tree is to be looked at; prefix_len is the streams' mean."""
        self._num_steps += 1
        if self.mean[0] == 0:
            return self._current, True
        known = self.num_samples, num_active, self.cutters[self.sizes[-1]].place(prefix_len)
        if known != self._chosen_for:
            rates = self.rates(num_active, prefix_len)
            best = max(rates, key=rates.__getitem__)
            if self._chosen_for is None or rates[best] > SWITCH_GAIN * rates[self._current]:
                self._current = best
            self._chosen_for = known
        other = self._other(num_active, prefix_len)
        if other is not None:
            return other, True
        is_early = self.num_samples < SAMPLE_EVERY
        return self._current, self._current.num_slots > 1 and (is_early or self._num_steps % SAMPLE_EVERY == 0)

    def _other(self, num_active: int, prefix_len: float) -> Size | None:
        """What to take now and then instead of the best size known, to learn what that cannot tell."""
        slots = self._current.num_slots
        if slots == self.sizes[-1] or self._num_steps % EXPLORE_EVERY:
            return None
        rates = self.rates(num_active, prefix_len)
        if slots == 1:
            return max((size for size in rates if size.num_slots > 1), key=rates.__getitem__)
        larger = self.sizes[self.sizes.index(slots) + 1]
        hoped = self.mean[:slots].sum() + (larger - slots) * self.mean[slots - 1]  # no node is likelier than a former
        gain = hoped / self.mean[:larger].sum()
        return Size(larger) if gain * rates[Size(larger)] > SWITCH_GAIN * rates[self._current] else None

    def rates(self, num_active: int, prefix_len: float) -> dict[Size, float]:
        """Tokens per second that are expected of steps of each size; over as many rows as trees have on average."""
        tokens, nodes = self.mean.cumsum()[self._ends].tolist(), self.is_there.cumsum()[self._ends].tolist()
        found = {}
        for slots, expected, count in zip(self.sizes, tokens, nodes, strict=True):
            (seconds,) = self.cutters[slots].seconds(num_active, prefix_len)
            at = max(num_active, round(num_active * count))
            rate = num_active * expected / (float(seconds[at]) - self.cut_s[slots])
            found[Size(slots)] = rate
            if slots > 1:
                found[Size(slots, True)] = rate * self._gain[slots]
        return found

    def learn(self, log_prob: np.ndarray, prefix_len: float) -> None:
        """Take in the trees f64 [A, N] of the streams that took part in a step, before anything was cut off."""
        mass = np.exp(log_prob)
        N, mean, is_there = mass.shape[1], mass.mean(0), (mass > 0).mean(0)
        weight = np.maximum(1 - (1 - 1 / MEMORY) ** self._age, 1 / (self.num_samples + 1 + self._begin_weight))
        weight[N:] = weight[N - 1]
        self._age[:N] = 1
        self._age[N:] += 1
        self._learn_gains(mass, prefix_len, float(weight[N - 1]))
        for known, now in ((self.is_there, is_there), (self.mean, mean)):
            known += weight * (_behind(now[None], known)[0] - known)
            np.minimum.accumulate(known, out=known)  # as it is in every tree
        self.num_samples += 1

    def _learn_gains(self, mass: np.ndarray, prefix_len: float, weight: float) -> None:
        """How much better than whole trees of these sizes cut ones are, for sizes around that of `mass` f64 [A, N]."""
        num_active, N = mass.shape
        at = self.sizes.index(N)
        whole = np.minimum(_behind(mass, self.mean), mass[:, -1:])
        whole[:, :N] = mass
        for slots in self.sizes[max(1, at - 1) : at + 2]:
            (seconds,) = self.cutters[slots].seconds(num_active, prefix_len)
            part = whole[:, :slots]
            counts = np.maximum((part > 0).sum(1), 1).tolist()
            with np.errstate(divide="ignore"):
                _, rate = cut_on_host(np.log(part), counts, seconds)
            gain = rate * float((seconds[sum(counts)] - self.cut_s[slots]) / part.sum())
            self._gain[slots] += weight * (gain - self._gain[slots])


def _behind(mass: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """`mass` f64 [A, N] made as long as `mean`, which is scaled by what the second halves have in common."""
    N = mass.shape[1]
    half = slice(N // 2, N)
    known = mean[half].sum()
    scale = np.clip(mass[:, half].sum(1) / known, 0, MAX_SCALE) if known > 0 else np.zeros(len(mass))
    return np.concatenate([mass, scale[:, None] * mean[N:]], axis=1)
