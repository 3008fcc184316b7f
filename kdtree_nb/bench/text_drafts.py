"""What a drafter says at every place of texts that are there already, and how much of it is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from kdtree_nb.drafters import AnyDrafter, AttachedDrafter, DraftCandidates, DraftContext, FeatureDrafter
from kdtree_nb.model import Model
from kdtree_nb.native import ops
from kdtree_nb.speculate.text_hidden import text_hidden
from kdtree_nb.tree import DraftTree

Remember = Callable[[int], None]
"""Gives a drafter the hidden states of the tokens that are committed at a place."""


def draft_along(
    model: Model, drafter: AnyDrafter, prompts: Sequence[list[int]], texts: Sequence[list[int]], num_candidates: int
) -> Iterator[tuple[int, DraftCandidates]]:  # fmt: skip
    """For place = 0, 1, … of texts of one length: the candidates for what follows prompt + text[:place].

    As the engine would be given them where it decodes these texts together. What lies deeper than the text is long, or
    reaches its last token, which is never drafted, has log-prob -inf.
    """
    num_tokens, V = len(texts[0]), model.config.vocab_size
    asked, remember = _attach(model, drafter, prompts, texts)
    for place in range(num_tokens):
        remember(place)
        context = DraftContext(
            tokens=[prompt + text[:place] for prompt, text in zip(prompts, texts, strict=True)],
            stream_ids=list(range(len(prompts))),
            num_prompt_tokens=[len(prompt) for prompt in prompts],
            num_candidates=min(num_candidates, V),
            vocab_size=V,
            device=model.device,
        )
        log_probs, token_ids = asked.draft(context)
        log_probs = log_probs.clone()
        log_probs[:, max(0, num_tokens - place - 1) :] = -torch.inf
        yield place, DraftCandidates(log_probs, token_ids)


def _attach(
    model: Model, drafter: AnyDrafter, prompts: Sequence[list[int]], texts: Sequence[list[int]]
) -> tuple[AnyDrafter, Remember]:  # fmt: skip
    """Who is asked, and what gives it hidden states."""
    if not isinstance(drafter, FeatureDrafter):
        return drafter, lambda place: None
    whole = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
    longest = max(map(len, whole))
    padded = torch.tensor([ids + [0] * (longest - len(ids)) for ids in whole], device=model.device)
    attached = drafter.attach(model, len(prompts), longest)
    hidden = text_hidden(model, padded, attached.feature_layers)
    starts = [len(prompt) for prompt in prompts]
    return attached, lambda place: _remember(attached, hidden, starts, place)


def _remember(drafter: AttachedDrafter, hidden: list[torch.Tensor], starts: list[int], place: int) -> None:
    """The states of all tokens but the last of prompt + text[:place] that were not given at the place before."""
    pairs = [
        (stream, position)
        for stream, start in enumerate(starts)
        for position in range(0 if place == 0 else start + place - 2, start + place - 1)
    ]
    if pairs:
        stream, position = torch.tensor(pairs, device=hidden[0].device).T
        features = torch.cat([states[stream, position] for states in hidden], 1)
        drafter.remember(features, stream.int(), position.int())


class Followed:
    """How far trees and chains reach along the texts that the target wrote, at one place of each.

    path:     per text, the accepted nodes of the largest tree, ascending: those up to b are the path in a tree of b
    expected: f64 [texts, 1 + max_budget], of a tree of b nodes the sum of exp(log-prob), root left out
    ranks:    per text, which of its parent's children each accepted node is
    """

    def __init__(self, tree: DraftTree, target_token: torch.Tensor) -> None:
        max_depth = max(int(tree.depth.max()), 0)
        path, num_accepted, _ = ops.tree_accept(tree, target_token, max_depth)
        nodes, lengths = path.tolist(), num_accepted.tolist()
        self.path = [row[:count] for row, count in zip(nodes, lengths, strict=True)]
        mass = tree.log_prob.exp()
        mass[:, 0] = 0
        self.expected = mass.cumsum(1).cpu().numpy()
        parents = tree.parent.cpu().numpy()
        self.ranks = [[int((parents[s, :n] == parents[s, n]).sum()) for n in row] for s, row in enumerate(self.path)]


def follow(
    draft: DraftCandidates, texts: Sequence[list[int]], bonus: Sequence[int], place: int, max_budget: int
) -> Followed:  # fmt: skip
    """The largest trees of a draft, followed along texts[:][place:]. bonus: the last token before, per text."""
    log_probs, token_ids = draft
    device = log_probs.device
    roots = torch.tensor(list(bonus), dtype=torch.int64, device=device)
    tree = ops.tree_build(log_probs.contiguous(), token_ids.contiguous(), roots, max_budget)
    ahead = torch.tensor(np.array([text[place:] for text in texts]), dtype=torch.int64, device=device)
    target_token = ahead.gather(1, tree.depth.clamp(min=0, max=ahead.shape[1] - 1).long())
    return Followed(tree, target_token)
