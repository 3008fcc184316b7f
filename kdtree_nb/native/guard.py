"""What a build is done under: once, the cache's lock and errors, and environment variables that are put back."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kdtree_nb.errors import KernelBuildError

LOCK_TIMEOUT_S = 600.0
"""How long to wait for another process that compiles the same kernels."""

Report = Callable[[str], None]
"""Receives progress lines."""


@contextlib.contextmanager
def cache_errors(cache: Path) -> Iterator[None]:
    """Turn a failure to write to the cache into a KernelBuildError with the remedy."""
    try:
        yield
    except OSError as error:
        raise KernelBuildError(
            f"native kernels: the cache {cache} cannot be written: {error}. "
            "Set KDTREE_CACHE_DIR to a folder that can be written, on a disk with space."
        ) from error


@contextlib.contextmanager
def file_lock(path: Path, timeout_s: float, report: Report) -> Iterator[None]:
    """Hold the operating system's lock on `path`. It dies with its process, so a killed build blocks nobody. Raises
    KernelBuildError where another process holds it for more than timeout_s."""
    with open(path, "a+", encoding="utf-8") as file:
        deadline = time.monotonic() + timeout_s
        waiting = False
        while not _try_lock(file.fileno()):
            file.seek(0)
            holder = file.read().strip() or "unknown"
            if time.monotonic() >= deadline:
                raise KernelBuildError(
                    f"native kernels: process {holder} has held the build lock {path} for more than {timeout_s:.0f} s. "
                    "End that process, or set KDTREE_CACHE_DIR to another folder."
                )
            if not waiting:
                report(f"waiting for process {holder}, which is compiling the native kernels")
                waiting = True
            time.sleep(0.1)
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Set environment variables for the duration of a build."""
    before = {key: os.environ.get(key) for key in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def build_once(
    cache: Path,
    name: str,
    compile_into: Callable[[Path], float],
    report: Report,
    lock_timeout_s: float = LOCK_TIMEOUT_S,
) -> tuple[Path, float]:
    """(the library cache/name/name.so, the seconds its compilation took: 0.0 if it was complete there already).

    `compile_into(folder)` puts it there by a rename and returns the seconds; one process at a time does so.
    """
    folder = cache / name
    library = folder / f"{name}.so"
    with cache_errors(cache):
        if library.is_file():
            return library, 0.0
        folder.mkdir(parents=True, exist_ok=True)
    with cache_errors(cache), file_lock(folder / "lock", lock_timeout_s, report):
        if library.is_file():  # another process has built it while this one waited
            return library, 0.0
        for leftover in folder.glob("build-*"):
            report(f"removing {leftover}, left by a build that did not finish")
            shutil.rmtree(leftover, ignore_errors=True)
        return library, compile_into(folder)
