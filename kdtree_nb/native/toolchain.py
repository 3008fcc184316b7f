"""What a build needs from the machine: a C++ compiler, ninja, the CPU's features. Found, or named with a remedy."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from kdtree_nb.errors import KdtreeError, KernelBuildError, KernelUnavailableError
from kdtree_nb.native.cuda_toolchain import CudaToolchain, find_cuda_toolchain

COMPILER_NAMES = ("c++", "g++", "clang++")
"""Looked for on PATH in this order when CXX is not set."""

CPU_FIELDS = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "Features")
"""Fields of /proc/cpuinfo that decide which instructions `-march=native` may emit."""


@dataclasses.dataclass(frozen=True)
class Toolchain:
    """What kernels are compiled with.

    compiler, compiler_version: the C++ compiler's command (CXX form) and the text of its version
    ninja_dir:                  the folder that holds ninja
    cpu:                        a digest of the CPU
    cuda:                       what compiles CUDA kernels, or the error that says why there are none
    """

    compiler: str
    compiler_version: str
    ninja_dir: Path
    cpu: str
    cuda: CudaToolchain | KdtreeError


def find_toolchain() -> Toolchain:
    """Find compiler and ninja, and CUDA if it is there.

    Raises KernelBuildError naming what was looked for, where, and the remedy. Without CUDA the CPU's kernels can be
    built all the same; the error that says why is kept for whoever asks for a GPU.
    """
    compiler = find_compiler()
    try:
        cuda: CudaToolchain | KdtreeError = find_cuda_toolchain()
    except (KernelBuildError, KernelUnavailableError) as error:
        cuda = error
    return Toolchain(compiler, compiler_version(compiler), find_ninja().parent, cpu_digest(), cuda)


def find_compiler() -> str:
    """The C++ compiler command: $CXX, else the first of c++, g++, clang++ on PATH. Raises KernelBuildError where there
    is none."""
    chosen = os.environ.get("CXX", "").strip()
    try:
        names = (shlex.split(chosen)[0],) if chosen else COMPILER_NAMES
    except ValueError as error:
        message = f"native kernels: CXX={chosen!r} is no command: {error}. Set CXX to a C++ compiler."
        raise KernelBuildError(message) from error
    for name in names:
        if shutil.which(name):
            return chosen or name
    looked_for = f"the compiler named by CXX={chosen!r}" if chosen else f"a C++ compiler ({', '.join(names)})"
    raise KernelBuildError(
        f"native kernels: {looked_for} was not found on PATH={os.environ.get('PATH', '')!r}. Install one "
        "(Debian, Ubuntu: `apt install g++`; Fedora: `dnf install gcc-c++`; conda: `conda install gxx`) "
        "or set CXX to its path."
    )


def as_one_word(compiler: str, folder: Path) -> str:
    """The compiler for torch, which takes CXX for one word: a launcher or options (`ccache g++`) go into a script
    in `folder`, which must be on PATH: torch 2.11 does not quote a path with spaces."""
    if len(shlex.split(compiler)) == 1:
        return compiler
    script = folder / "kdtree-g++"
    script.write_text(f'#!/bin/sh\nexec {compiler} "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    return script.name


def compiler_version(compiler: str) -> str:
    """First line of `compiler --version`. Raises KernelBuildError where that fails."""
    command = [*shlex.split(compiler), "--version"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelBuildError(
            f"native kernels: `{shlex.join(command)}` failed: {error}. Set CXX to a working C++ compiler."
        ) from error
    return done.stdout.partition("\n")[0]


def find_ninja() -> Path:
    """The ninja binary: beside this interpreter (also of a venv that is not activated), else on PATH. Raises
    KernelBuildError where there is none."""
    folders = dict.fromkeys([str(Path(sys.executable).parent), sysconfig.get_path("scripts")])
    found = shutil.which("ninja", path=os.pathsep.join(folders)) or shutil.which("ninja")
    if found:
        return Path(found)
    raise KernelBuildError(
        f"native kernels: no `ninja` in {', '.join(folders)} nor on PATH={os.environ.get('PATH', '')!r}. "
        f"Install it: `{sys.executable} -m pip install ninja`."
    )


def cpu_features() -> dict[str, str]:
    """Fields of the first processor in /proc/cpuinfo that a build depends on; elsewhere machine and processor name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
    except OSError:
        lines = []
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    known = {key: fields[key] for key in CPU_FIELDS if key in fields}
    return known or {"machine": platform.machine(), "processor": platform.processor()}


def cpu_digest() -> str:
    """Hex digest of `cpu_features`: a cache copied to another CPU gets a folder of its own."""
    text = "\n".join(f"{key}={value}" for key, value in sorted(cpu_features().items()))
    return hashlib.sha256(text.encode()).hexdigest()
