"""A rank that is killed, stopped, fails or has something else: the others say so and end, in bounded time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import pytest
import torch

from kdtree_nb import parallel
from kdtree_nb.errors import KernelUnavailableError, RankError
from kdtree_nb.native import build
from tests.parallel import programs

BOUND_S = 30.0


@pytest.fixture(autouse=True, scope="module")
def _kernels():
    """Compiled before any time is measured."""
    build.load()


HASTY = parallel.Patience(start_s=30.0, exchange_s=6.0, silence_s=3.0, grace_s=5.0)


def failures(program, num_ranks: int, *args, patience=HASTY) -> tuple[str, float]:
    """What the run says, and how long it took."""
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        parallel.run(program, num_ranks, *args, timeout_s=60, patience=patience)
    return str(caught.value), time.monotonic() - start


def test_a_killed_rank_is_reported_by_the_others_within_30_s():
    text, seconds = failures(programs.stop_midway, 4, 3, "kill", patience=parallel.Patience())
    assert text.count("rank 3 has given no sign of life for 8 s") == 3
    assert seconds < BOUND_S


def test_a_stopped_rank_is_reported_by_the_others():
    text, seconds = failures(programs.stop_midway, 2, 1, "stop")
    assert "rank 1 has given no sign of life for 3 s" in text and "rank 1: no result in time" in text
    assert seconds < BOUND_S


def test_a_rank_that_fails_tells_the_others_why():
    text, seconds = failures(programs.stop_midway, 2, 0, "raise")
    assert "KeyError: 'planted'" in text and "rank 0 failed: KeyError: 'planted'" in text
    assert seconds < BOUND_S


@pytest.mark.parametrize(
    ("what", "named"),
    [("configuration", "the model (configuration, dtype, weights)"), ("weights", "the model"), ("dtype", "the model"),
     ("prompt", "generate (prompts and options)")],
)  # fmt: skip
def test_ranks_that_have_something_else_are_an_error(what, named):
    text, seconds = failures(programs.load_different, 2, what)
    assert re.search(re.escape(f"tensor parallel: {named}") + ".*expected the same on all 2 ranks", text)
    assert seconds < BOUND_S


def test_a_budget_of_auto_is_refused_at_once():
    told = parallel.run(programs.budget_auto, 2)
    assert all('Engine: budget: expected a number on several ranks, got "auto"' in text for text in told)


@pytest.mark.parametrize("num_ranks", [0, 3, "2", 2.0, True])
def test_numbers_of_ranks_that_are_none(num_ranks):
    with pytest.raises(ValueError, match="world size: expected 1, 2, 4 or 8 ranks.*got"):
        parallel.run(programs.sleep_forever, num_ranks)


def test_what_cannot_be_pickled_is_named():
    with pytest.raises(ValueError, match="run: expected a program and arguments that can be pickled, got .*lambda"):
        parallel.run(lambda ranks: 1, 1)
    text, _ = failures(programs.unpicklable, 1)
    assert "rank 0: its result: expected one that can be pickled" in text and "lambda" in text


def test_a_negative_number_of_threads():
    with pytest.raises(ValueError, match="run: num_threads: expected at least 1.*got -1"):
        parallel.run(programs.sleep_forever, 1, num_threads=-1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there():
    with pytest.raises(KernelUnavailableError, match="tensor parallel: cuda:1: expected a GPU below cuda:0"):
        parallel.start("cuda:1")


def start_rank(rank: int, num_ranks: int, port: int) -> subprocess.Popen:
    script = "from kdtree_nb import parallel; parallel.start()"
    place = {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return subprocess.Popen([sys.executable, "-c", script], env=os.environ | place, stderr=subprocess.PIPE, text=True)


def test_ranks_of_another_world_size_are_an_error():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [start_rank(0, 2, port), start_rank(1, 4, port)]
    try:
        told = [rank.communicate(timeout=BOUND_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert any("tensor parallel: the world size" in text and "expected the same" in text for text in told), told


def test_start_says_what_is_missing(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="expected RANK, WORLD_SIZE.*found no RANK.*torchrun"):
        parallel.start()
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "3"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="world size: expected 1, 2, 4 or 8"):
        parallel.start()
    for name, value in (("RANK", "3"), ("RANK", "-1"), ("WORLD_SIZE", "two"), ("MASTER_PORT", "1.5")):
        with (
            monkeypatch.context() as patch,
            pytest.raises(ValueError, match=f"tensor parallel: {name}: expected .*, got"),
        ):
            patch.setenv(name, value)
            parallel.start()
