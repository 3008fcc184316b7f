"""Why the native kernels can or cannot be built and run here: one finding per question."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

import torch

from kdtree_nb.errors import KernelBuildError, KernelUnavailableError
from kdtree_nb.native import build, toolchain
from kdtree_nb.native.cuda_toolchain import find_cuda_toolchain
from kdtree_nb.native.devices import why_not_on

Status = Literal["ok", "absent", "problem"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One answer. status: "ok"; "absent" for something optional that is not there; "problem" if the kernels need it."""

    name: str
    status: Status
    detail: str
    remedy: str = ""

    def to_dict(self) -> dict[str, str]:
        """The fields as a JSON-ready dictionary."""
        return dataclasses.asdict(self)


def diagnose() -> list[Finding]:
    """Look at everything a build needs and everything a run can use. Compiles nothing and raises nothing."""
    python = f"{platform.python_version()} at {sys.executable}"
    kind = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
    return [
        Finding("python", "ok", python),
        Finding("torch", "ok", f"{torch.__version__}, {kind}"),
        _compiler(),
        _ninja(),
        _sources(),
        _cache(),
        _cpu(),
        Finding("threads", "ok", f"{torch.get_num_threads()} threads for {os.cpu_count()} processors"),
        _nvcc(),
        *_cuda_devices(),
        _cuda_kernels(),
    ]


def _compiler() -> Finding:
    try:
        compiler = toolchain.find_compiler()
        path = shutil.which(compiler) or compiler
        return Finding("compiler", "ok", f"{path}: {toolchain.compiler_version(compiler)}")
    except KernelBuildError as error:
        return _problem("compiler", error)


def _ninja() -> Finding:
    try:
        return Finding("ninja", "ok", str(toolchain.find_ninja()))
    except KernelBuildError as error:
        return _problem("ninja", error)


def _sources() -> Finding:
    try:
        root = build.kernels_dir()
        count = sum(len(build.sources(root, device)) for device in build.device_kinds())
        return Finding("sources", "ok", f"{count} files in {root}")
    except KernelBuildError as error:
        return _problem("sources", error)


def _problem(name: str, error: KernelBuildError) -> Finding:
    detail, _, remedy = str(error).partition(". ")
    return Finding(name, "problem", detail, remedy)


def _cache() -> Finding:
    folder = build.cache_dir()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        remedy = "set KDTREE_CACHE_DIR to a folder that can be written"
        return Finding("cache", "problem", f"{folder} cannot be written: {error}", remedy)
    libraries = sorted(folder.glob("kdtree_*/kdtree_*.so"))
    unfinished = sorted(folder.glob("kdtree_*/build-*"))
    size_mib = sum(path.stat().st_size for path in libraries) / 2**20
    detail = f"{folder}: {len(libraries)} builds, {size_mib:.1f} MiB; {_state(libraries)}"
    if unfinished:
        detail += f"; {len(unfinished)} running or unfinished builds, which the next build removes"
    return Finding("cache", "ok", detail)


def _state(libraries: list[Path]) -> str:
    """Whether the library for the sources of today is among those in the cache."""
    try:
        name = build.namespace_of(build.kernels_dir(), toolchain.find_toolchain())
    except KernelBuildError:
        return "what is needed cannot be named without a toolchain"
    if name not in {path.stem for path in libraries}:
        return f"{name} is not among them and will be compiled on first use"
    seconds = _compile_seconds(build.cache_dir() / name / "build.json")
    return f"{name} is ready" + (f" (compiled in {seconds} s)" if seconds else "")


def _compile_seconds(record: Path) -> str:
    try:
        return str(json.loads(record.read_text(encoding="utf-8"))["compile_s"])
    except (OSError, ValueError, KeyError):
        return ""


def _cpu() -> Finding:
    features = toolchain.cpu_features()
    flags = set((features.get("flags") or features.get("Features") or "").split())
    wanted = ("avx2", "fma", "avx512f", "avx512_bf16", "asimd", "bf16")
    vectors = ", ".join(flag for flag in wanted if flag in flags) or "no vector extension that the kernels know"
    return Finding("cpu", "ok", f"{platform.machine()}, {vectors}")


def _nvcc() -> Finding:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    path = shutil.which("nvcc", path=str(Path(home) / "bin")) if home else shutil.which("nvcc")
    if path is None:
        where = f"{home}/bin (CUDA_HOME)" if home else "PATH"
        return Finding("nvcc", "absent", f"not found in {where}", "needed only for CUDA kernels")
    try:
        text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("nvcc", "problem", f"{path} --version failed: {error}", "reinstall the CUDA toolkit")
    version = next((line for line in text.splitlines() if "release" in line), text.strip())
    return Finding("nvcc", "ok", f"{path}: {version.strip()}")


def _cuda_kernels() -> Finding:
    try:
        found = find_cuda_toolchain()
    except KernelUnavailableError as error:  # nothing is wrong: this machine's kernels run on the CPU
        detail, _, remedy = str(error).partition(". ")
        return Finding("cuda kernels", "absent", detail, remedy)
    except KernelBuildError as error:
        return _problem("cuda kernels", error)
    archs = ", ".join(f"sm_{arch}" for arch in found.archs)
    return Finding("cuda kernels", "ok", f"for {archs}, by {found.nvcc}")


def _cuda_devices() -> list[Finding]:
    if not torch.cuda.is_available():
        reason = "no GPU is visible" if torch.version.cuda else "no GPU can be used: torch is a CPU build"
        return [Finding("cuda", "absent", reason, "the kernels run on the CPU")]
    findings = []
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        detail = f"{device.name}, sm_{device.major}{device.minor}, {device.total_memory / 2**30:.0f} GiB"
        remedy = why_not_on(torch.device("cuda", index))
        findings.append(Finding(f"cuda:{index}", "absent" if remedy else "ok", detail, remedy))
    return findings
