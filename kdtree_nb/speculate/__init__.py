"""The engine: draft, build, verify, accept, compact."""

from kdtree_nb.speculate.cost import CostModel
from kdtree_nb.speculate.cost_store import load_cost, save_cost
from kdtree_nb.speculate.engine import Engine
from kdtree_nb.speculate.handle import Handle, Latency
from kdtree_nb.speculate.measure_cost import Effort as CostEffort
from kdtree_nb.speculate.measure_cost import calibrate
from kdtree_nb.speculate.metrics import Metrics, RankCounter, summarize
from kdtree_nb.speculate.sampling import Sampling
from kdtree_nb.speculate.stats import Generation, GenerationStats, StepRecord

__all__ = [
    "CostEffort",
    "CostModel",
    "Engine",
    "Generation",
    "GenerationStats",
    "Handle",
    "Latency",
    "Metrics",
    "RankCounter",
    "Sampling",
    "StepRecord",
    "calibrate",
    "load_cost",
    "save_cost",
    "summarize",
]
