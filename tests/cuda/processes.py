"""Processes that may have to be killed: a kernel that hangs keeps the GPU busy until its process has ended.

A process is killed with all that it started, whatever session or group they are in.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

KILL_S = 20.0
"""The most seconds for a killed process to end: the driver takes its kernel off the GPU first."""


def parents() -> dict[int, int]:
    """Process -> its parent, of all that run now. Linux."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    return found


def kill_tree(process: subprocess.Popen) -> None:
    """SIGKILL for the process and all its descendants; subprocess.TimeoutExpired if it does not end of it."""
    parent, tree = parents(), [process.pid]
    for pid in tree:  # grows
        tree += [child for child, its_parent in parent.items() if its_parent == pid]
    for pid in tree:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(KILL_S)


def run_for(command: list[str], seconds: float, environment: dict[str, str]) -> tuple[str, int | None]:
    """Output and exit code of a process; None instead of the code if it ran longer and was killed."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        try:
            return process.communicate(timeout=seconds)[0], process.returncode
        except subprocess.TimeoutExpired:
            kill_tree(process)
            return process.communicate()[0], None


def watch(command: list[str], silence_s: float, environment: dict[str, str]) -> int | None:
    """Prints what a process prints. Its exit code; None if it printed nothing for so many seconds and was killed."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment) as process:
        while select.select([process.stdout], [], [], silence_s)[0]:
            if not (text := os.read(process.stdout.fileno(), 1 << 16)):
                return process.wait(KILL_S)
            sys.stdout.write(text.decode(errors="replace"))
            sys.stdout.flush()
        kill_tree(process)
        return None
