"""Benchmarks: each claim about speed as raw samples of interleaved contenders, checked for agreement before timing."""

from kdtree_nb.bench import acceptance, coverage, prompt_sets, stream_groups
from kdtree_nb.bench.cuda_groups import cuda_groups
from kdtree_nb.bench.device_targets import TARGETS, targets_of
from kdtree_nb.bench.groups import GROUPS
from kdtree_nb.bench.lab import Lab
from kdtree_nb.bench.record import make_record, write_record
from kdtree_nb.bench.runner import BenchmarkError, Effort, Failure, Measurement, run_groups
from kdtree_nb.bench.targets import Target, Verdict, judge, markdown_table, ratio

__all__ = [
    "GROUPS",
    "TARGETS",
    "BenchmarkError",
    "Effort",
    "Failure",
    "Lab",
    "Measurement",
    "Target",
    "Verdict",
    "acceptance",
    "coverage",
    "cuda_groups",
    "judge",
    "make_record",
    "markdown_table",
    "prompt_sets",
    "ratio",
    "run_groups",
    "stream_groups",
    "targets_of",
    "write_record",
]
