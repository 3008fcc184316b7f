"""The thread pool of the kernels: any number of threads, several callers at once, forks, the end of the process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading

import pytest
import torch

from kdtree_nb import ops

TIMEOUT_S = 60


@pytest.fixture
def num_threads():
    """Sets torch's number of threads, which kernels follow, for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def product(seed: int = 0):
    """A function that multiplies enough to be shared out, as a fresh result per call."""
    generator = torch.Generator().manual_seed(seed)
    packed = ops.pack_linear(torch.randn(512, 256, generator=generator))
    x = torch.randn(17, 256, generator=generator)
    return lambda: ops.linear(x, packed)


@pytest.mark.parametrize("count", [2, 3, 9])
def test_the_number_of_threads_does_not_change_results(count, num_threads):
    function = product()
    num_threads(1)
    alone = function()
    num_threads(count)
    assert all(torch.equal(function(), alone) for _ in range(200))


def test_callers_at_once_get_their_own_results(num_threads):
    num_threads(2)
    functions = [product(seed) for seed in range(4)]
    expected = [function() for function in functions]
    wrong, finished = [], []

    def repeat(i: int) -> None:
        torch.set_num_threads(2)
        wrong.extend(i for _ in range(300) if not torch.equal(functions[i](), expected[i]))
        finished.append(i)

    threads = [threading.Thread(target=repeat, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert sorted(finished) == [0, 1, 2, 3] and not wrong


def run_script(body: str) -> subprocess.CompletedProcess:
    """A process of its own with `product()` at hand, which must end by itself."""
    script = f"import os, sys, threading, torch\nsys.path.insert(0, {os.path.dirname(__file__)!r})\n"
    script += "from test_parallel import product\ntorch.set_num_threads(2)\nfunction = product()\n"
    script += "expected = function()\n" + textwrap.dedent(body)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=TIMEOUT_S)


def test_a_forked_process_starts_anew():
    done = run_script("""
        for _ in range(3):
            child = os.fork()
            if child == 0:
                os._exit(0 if all(torch.equal(function(), expected) for _ in range(100)) else 1)
            assert torch.equal(function(), expected)
            assert os.waitpid(child, 0)[1] == 0
        print("three children")
    """)
    assert done.returncode == 0 and done.stdout == "three children\n", done.stderr


def test_the_process_ends_while_workers_live():
    for ending in ("", "sys.exit(0)", "os._exit(0)"):
        done = run_script(f"function()\n{ending}")
        assert done.returncode == 0 and done.stderr == ""


def test_the_process_ends_while_another_thread_calls():
    done = run_script("""
        def forever():
            while True:
                function()
        threading.Thread(target=forever, daemon=True).start()
        for _ in range(100):
            function()
        os._exit(0)
    """)
    assert done.returncode == 0 and done.stderr == ""
