"""The engine: draft, build, verify, accept, compact."""

from kdtree_nb.speculate.engine import Engine
from kdtree_nb.speculate.sampling import Sampling
from kdtree_nb.speculate.stats import Generation, GenerationStats, StepRecord

__all__ = ["Engine", "Generation", "GenerationStats", "Sampling", "StepRecord"]
