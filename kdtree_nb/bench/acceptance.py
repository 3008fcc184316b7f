"""How many drafted tokens a target accepts, for every budget at once and without a tree forward.

The target's greedy text is decoded once. At each of its places the drafter is asked once and one best-first tree of the
largest budget is built; trees are nested, so the accepted path of every smaller budget is in it. Which places a budget
visits follows from how far it gets: so these are the steps that the engine would take, which `check` asserts.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from kdtree_nb.bench.runner import require
from kdtree_nb.bench.text_drafts import Followed, draft_along, follow
from kdtree_nb.drafters import AnyDrafter, DraftCandidates, NGram
from kdtree_nb.model import Model
from kdtree_nb.speculate import Engine
from kdtree_nb.speculate.metrics import accepted_by_depth

BUDGETS = (8, 16, 32, 64, 128, 256)
CHAIN = "chain"
"""In place of a budget: the likeliest token of every depth, as deep as the drafter goes."""

FIRST_TOKENS = 64
"""Later tokens of a small model's greedy text are often a loop."""

AT_ONCE = 32
"""Texts that are decoded, and drafted for, together."""

Budget = int | str


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """What one drafter would get accepted at every place of N greedy texts of T tokens.

    texts:    the target's tokens
    accepted: budget -> i32 [N, T], tokens accepted where a step begins at that place
    expected: budget -> f64 [N, T], what the drafter expected of it
    ranks:    budget -> per text and place, which of its parent's children each accepted node is
    """

    texts: list[list[int]]
    accepted: dict[Budget, np.ndarray]
    expected: dict[Budget, np.ndarray]
    ranks: dict[Budget, list[list[list[int]]]]

    def steps(self, budget: Budget, text: int, num_tokens: int | None = None) -> list[int]:
        """The places at which the steps over a text begin, or over its first num_tokens tokens."""
        end = len(self.texts[text]) if num_tokens is None else min(num_tokens, len(self.texts[text]))
        places, place = [], 0
        while place < end:
            places.append(place)
            place += int(self.accepted[budget][text, place]) + 1
        return places

    def tau(self, budget: Budget, chosen: Sequence[int] | None = None, num_tokens: int | None = None) -> float:
        """Tokens per target forward, pooled over all steps of all texts, or of those chosen."""
        lengths, counts = self._counts(budget, chosen, num_tokens)
        return sum(lengths) / sum(counts)

    def tau_mean(self, budget: Budget, chosen: Sequence[int] | None = None, num_tokens: int | None = None) -> float:
        """The mean of the texts' own tau."""
        lengths, counts = self._counts(budget, chosen, num_tokens)
        return float(np.mean([length / count for length, count in zip(lengths, counts, strict=True)]))

    def _counts(
        self, budget: Budget, chosen: Sequence[int] | None, num_tokens: int | None
    ) -> tuple[list[int], list[int]]:  # fmt: skip
        indices = range(len(self.texts)) if chosen is None else chosen
        lengths = [len(self.texts[i]) if num_tokens is None else min(num_tokens, len(self.texts[i])) for i in indices]
        return lengths, [len(self.steps(budget, i, num_tokens)) for i in indices]

    def calibration(self, budget: Budget) -> tuple[float, float]:
        """(expected, accepted) tokens of a step, the means over all steps."""
        visited = [(i, place) for i in range(len(self.texts)) for place in self.steps(budget, i)]
        rows, columns = np.array(visited).T
        return tuple(float(values[budget][rows, columns].mean()) for values in (self.expected, self.accepted))

    def accepted_by_depth(self, budget: Budget) -> list[float]:
        """d = 1 …: share of the steps that accept at least d drafted tokens."""
        return accepted_by_depth(
            [int(self.accepted[budget][i, p]) for i in range(len(self.texts)) for p in self.steps(budget, i)]
        )

    def accepted_by_rank(self, budget: Budget) -> list[float]:
        """rank 0 …: share of the accepted nodes that are their parent's best child, second, …"""
        ranks = [r for i in range(len(self.texts)) for p in self.steps(budget, i) for r in self.ranks[budget][i][p]]
        return (np.bincount(ranks) / len(ranks)).tolist() if ranks else []

    def less_repetitive(self) -> list[int]:
        """The half of the texts with the larger share of distinct runs of four tokens."""
        by_share = sorted(range(len(self.texts)), key=lambda i: -distinct_runs(self.texts[i]))
        return sorted(by_share[: -(-len(by_share) // 2)])

    def report(self) -> list[dict[str, Any]]:
        """JSON-ready figures, one entry per budget."""
        half = self.less_repetitive()
        found = []
        for budget in self.accepted:
            expected, accepted = self.calibration(budget)
            found.append({
                "budget": budget,
                "tau": self.tau(budget),
                "tau_mean": self.tau_mean(budget),
                "tau_first_tokens": self.tau(budget, num_tokens=FIRST_TOKENS),
                "tau_less_repetitive": self.tau(budget, half),
                "expected": expected,
                "accepted": accepted,
                "accepted_by_depth": self.accepted_by_depth(budget),
                "accepted_by_rank": self.accepted_by_rank(budget),
            })  # fmt: skip
        return found


def distinct_runs(text: Sequence[int], length: int = 4) -> float:
    """Share of distinct ones among the runs of `length` tokens; 1 for a text that has none."""
    runs = [tuple(text[i : i + length]) for i in range(len(text) - length + 1)]
    return len(set(runs)) / len(runs) if runs else 1.0


def decode_texts(
    model: Model, prompts: Sequence[list[int]], num_tokens: int, show_progress: bool = False
) -> list[list[int]]:
    """The target's greedy text after every prompt; nothing ends it early."""
    engine, texts = Engine(model), []
    for group in tqdm(_groups(prompts), desc="decode", unit="batch", disable=not show_progress):
        texts += [g.tokens for g in engine.generate_ar(group, num_tokens, stop_token_ids=())]
    return texts


@torch.inference_mode()
def measure_acceptance(
    model: Model, drafter: AnyDrafter, prompts: Sequence[list[int]], texts: Sequence[list[int]],
    budgets: Sequence[int] = BUDGETS, show_progress: bool = False,
) -> Acceptance:  # fmt: skip
    """What `drafter` gets accepted along `texts`, which the target wrote after `prompts`; all of one length."""
    found = _empty(texts, [CHAIN, *budgets])
    bar = tqdm(total=len(texts), desc=type(drafter).__name__, unit="text", disable=not show_progress)
    for first in range(0, len(texts), AT_ONCE):
        group, heads = list(texts[first : first + AT_ONCE]), list(prompts[first : first + AT_ONCE])
        for place, draft in draft_along(model, drafter, heads, group, max(budgets)):
            bonus = [text[place - 1] if place else head[-1] for head, text in zip(heads, group, strict=True)]
            chain = DraftCandidates(*(values[..., :1] for values in draft))
            depth = chain.log_probs.shape[1]
            _note(found, [CHAIN], follow(chain, group, bonus, place, depth), first, place)
            _note(found, budgets, follow(draft, group, bonus, place, max(budgets)), first, place)
        bar.update(len(group))
    bar.close()
    return found


def _empty(texts: Sequence[list[int]], budgets: Sequence[Budget]) -> Acceptance:
    shape = (len(texts), len(texts[0]))
    accepted = {budget: np.zeros(shape, dtype=np.int32) for budget in budgets}
    expected = {budget: np.zeros(shape) for budget in budgets}
    ranks = {budget: [[[] for _ in text] for text in texts] for budget in budgets}
    return Acceptance([list(text) for text in texts], accepted, expected, ranks)


def _note(found: Acceptance, budgets: Sequence[Budget], followed: Followed, first: int, place: int) -> None:
    """Enter, for each budget, what the first nodes of the trees came to at one place of the texts from `first` on."""
    largest = followed.expected.shape[1] - 1
    for budget in budgets:
        limit = largest if budget == CHAIN else min(int(budget), largest)
        found.expected[budget][first : first + len(followed.path), place] = followed.expected[:, limit]
        for text, (path, ranks) in enumerate(zip(followed.path, followed.ranks, strict=True), start=first):
            count = bisect.bisect_right(path, limit)
            found.accepted[budget][text, place] = count
            found.ranks[budget][text][place] = ranks[:count]


def check(
    model: Model, drafter: AnyDrafter, prompts: Sequence[list[int]], acceptance: Acceptance, budget: Budget,
    show_progress: bool = False,
) -> int:  # fmt: skip
    """Decode every prompt with the engine: the same tokens as AR, in as many steps as were worked out.

    Returns the number of texts. Raises BenchmarkError on a difference.
    """
    mode, nodes = ("chain", drafter.depth) if budget == CHAIN else ("tree", budget)
    engine = Engine(model, drafter, nodes, mode=mode)
    texts, num_tokens = acceptance.texts, len(acceptance.texts[0])
    bar = tqdm(total=len(texts), desc=f"check {budget}", unit="text", disable=not show_progress)
    for first in range(0, len(texts), AT_ONCE):
        got = engine.generate_ddtree(list(prompts[first : first + AT_ONCE]), num_tokens, stop_token_ids=())
        for i, generation in enumerate(got, start=first):
            require(generation.tokens == texts[i], "acceptance", f"the tokens of text {i}")
            accepted = [int(acceptance.accepted[budget][i, p]) for p in acceptance.steps(budget, i)]
            require(generation.stats.accepted_per_step == accepted, "acceptance", f"the steps of text {i}")
        bar.update(len(got))
    bar.close()
    return len(texts)


def evaluate(
    model: Model, drafter: AnyDrafter, sets: Mapping[str, Sequence[list[int]]], num_tokens: int = 128,
    budgets: Sequence[int] = BUDGETS, checked: Sequence[Budget] = (CHAIN, 64), show_progress: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Everything that is to be shown of a drafter, JSON-ready: by set of prompts and by budget, prompt lookup beside.

    checked: budgets with which the engine decodes every prompt, to assert that its text and steps are these
    """
    found = {}
    for name, prompts in sets.items():
        texts = decode_texts(model, prompts, num_tokens, show_progress)
        acceptance = measure_acceptance(model, drafter, prompts, texts, budgets, show_progress)
        lookup = measure_acceptance(model, NGram(), prompts, texts, budgets[:1], show_progress)
        exact = {str(b): check(model, drafter, prompts, acceptance, b, show_progress) for b in checked}
        found[name] = {
            "num_texts": len(texts),
            "num_tokens": num_tokens,
            "exact_texts": exact,
            "distinct_runs": float(np.mean([distinct_runs(text) for text in texts])),
            "budgets": acceptance.report(),
            "prompt_lookup": lookup.report(),
        }
    return found


def _groups(values: Sequence[list[int]]) -> list[list[list[int]]]:
    return [list(values[first : first + AT_ONCE]) for first in range(0, len(values), AT_ONCE)]
