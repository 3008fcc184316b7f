"""Drafters: who proposes the tokens of a draft tree. The output never depends on them, only the speed does."""

from kdtree_nb.drafters.always_wrong import AlwaysWrong
from kdtree_nb.drafters.base import (
    AnyDrafter,
    AttachedDrafter,
    DeviceDrafter,
    DraftCandidates,
    DraftContext,
    Drafter,
    FeatureDrafter,
)
from kdtree_nb.drafters.dflash import DFlash, DFlashConfig
from kdtree_nb.drafters.ngram import NGram
from kdtree_nb.drafters.oracle import Oracle
from kdtree_nb.drafters.random import Random
from kdtree_nb.drafters.skip_gram import SkipGram

__all__ = [
    "AlwaysWrong",
    "AnyDrafter",
    "AttachedDrafter",
    "DFlash",
    "DFlashConfig",
    "DeviceDrafter",
    "DraftCandidates",
    "DraftContext",
    "Drafter",
    "FeatureDrafter",
    "NGram",
    "Oracle",
    "Random",
    "SkipGram",
]
