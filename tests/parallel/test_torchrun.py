"""The command line under torchrun prints what it prints alone, once."""

from __future__ import annotations

import subprocess
import sys

OPTIONS = ["generate", "--prompt", "def area(width, height):\n    return", "--max-new-tokens", "40"]


def test_two_ranks_of_torchrun_print_the_text_of_one_process():
    alone = subprocess.run([sys.executable, "-m", "kdtree_nb", *OPTIONS], capture_output=True, timeout=120)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "kdtree_nb", *OPTIONS, "--tensor-parallel"]
    ranks = subprocess.run(command, capture_output=True, timeout=120)
    assert alone.returncode == ranks.returncode == 0, ranks.stderr.decode()
    assert ranks.stdout == alone.stdout and len(alone.stdout) >= 40
    assert ranks.stderr.count(b"[40 tokens in") == 1
