"""Benchmarks: each claim about speed as raw samples of interleaved contenders, checked for agreement before timing."""

from kdtree_nb.bench.groups import GROUPS
from kdtree_nb.bench.record import make_record, write_record
from kdtree_nb.bench.runner import BenchmarkError, Effort, Measurement, run_groups
from kdtree_nb.bench.targets import TARGETS, Target, missed_targets, ratio

__all__ = [
    "GROUPS",
    "TARGETS",
    "BenchmarkError",
    "Effort",
    "Measurement",
    "Target",
    "make_record",
    "missed_targets",
    "ratio",
    "run_groups",
    "write_record",
]
