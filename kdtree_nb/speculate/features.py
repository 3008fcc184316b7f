"""Features: the target's hidden states of committed tokens, on their way to a drafter that wants them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kdtree_nb.drafters import AnyDrafter, AttachedDrafter, Drafter, FeatureDrafter
from kdtree_nb.model import LatentCache, Model
from kdtree_nb.native import ops


class Features:
    """Who wants which hidden states of the tokens in `cache`: nobody, until a drafter that does is attached.

    layers: the target's layers whose outputs are wanted
    """

    def __init__(self, model: Model, cache: LatentCache) -> None:
        self._model, self._cache = model, cache
        self._drafter: FeatureDrafter | None = None
        self._kept: AttachedDrafter | None = None
        self.reader: AttachedDrafter | None = None
        self.layers: tuple[int, ...] = ()

    def attach(self, drafter: AnyDrafter | None) -> Drafter | None:
        """Who drafts for the next texts: `drafter` itself, or what it attaches here, which is kept for the next time.

        Raises ValueError where it was not made for the model.
        """
        if not isinstance(drafter, FeatureDrafter):
            self.reader, self.layers = None, ()
            return drafter
        if self._drafter is not drafter:
            self._kept = drafter.attach(self._model, self._cache.num_streams, self._cache.num_slots)
            self._drafter = drafter
        self.reader, self.layers = self._kept, self._kept.feature_layers
        return self.reader

    def remember(self, hidden: Iterable[torch.Tensor], stream: torch.Tensor, position: torch.Tensor) -> None:
        """Hand on the hidden states float [T, D] of committed tokens behind each layer; see AttachedDrafter."""
        if self.reader is not None:
            self.reader.remember(torch.cat(list(hidden), 1), stream, position)


def remember_accepted(
    reader: AttachedDrafter, hidden: Iterable[torch.Tensor], first_row: torch.Tensor, prefix_len: torch.Tensor,
    path: torch.Tensor, num_accepted: torch.Tensor, active: torch.Tensor,
) -> None:  # fmt: skip
    """Hand on the hidden states of the root and the accepted nodes of each active stream, without the host.

    Per stream i32 [S]: first_row, the row of the root; prefix_len, its position; num_accepted; active. path i32 [S, L]
    holds the accepted nodes.
    """
    reader.remember(*ops.accepted_features(list(hidden), first_row, prefix_len, path, num_accepted, active))
