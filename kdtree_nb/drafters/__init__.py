"""Drafters: who proposes the tokens of a draft tree. The output never depends on them, only the speed does."""

from kdtree_nb.drafters.always_wrong import AlwaysWrong
from kdtree_nb.drafters.base import DraftCandidates, DraftContext, Drafter
from kdtree_nb.drafters.ngram import NGram
from kdtree_nb.drafters.oracle import Oracle
from kdtree_nb.drafters.random import Random

__all__ = ["AlwaysWrong", "DraftCandidates", "DraftContext", "Drafter", "NGram", "Oracle", "Random"]
