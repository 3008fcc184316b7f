"""Find, hash, compile once, load: the native kernels as one shared library, or an error that says why not.

The library, its torch namespace and its folder in the cache carry one fingerprint of everything that goes into it:
sources, headers, flags, compiler, torch, CPU. So a stale or foreign library can never be picked up, and two versions
never register the same names. A build happens in a folder of its own and is renamed into place when it is complete.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from kdtree_nb.errors import KernelBuildError, KernelUnavailableError
from kdtree_nb.native.cuda_toolchain import CudaToolchain
from kdtree_nb.native.guard import LOCK_TIMEOUT_S, Report, build_once, environment
from kdtree_nb.native.toolchain import Toolchain, as_one_word, find_toolchain

if TYPE_CHECKING:  # imported where it is used: `native.capi` does without torch
    import torch

FLAGS = ("-O3", "-march=native", "-pthread", "-ffp-contract=off")
"""Compiler flags of every source. No fast-math: additions keep their order; fma happens only where it is written."""

LINK_FLAGS = ("-pthread", "-Wl,--no-undefined")

_BINDING_S = 10.0  # a file that includes torch's lean headers compiles in about this time
_KERNEL_S = 1.0  # one without
_CUDA_S = 6.0  # and one of CUDA, per architecture


@dataclasses.dataclass(frozen=True)
class Build:
    """A library of kernels.

    namespace: of its operators in torch.ops
    path:      of the file
    compile_s: seconds that compiling it took (0.0 from the cache)
    no_cuda:   why it has no kernels for GPUs; empty if it has
    """

    namespace: str
    path: Path
    compile_s: float
    no_cuda: str


@dataclasses.dataclass
class _Process:
    """What this process has loaded. Operators register once per process, so this state belongs to the process."""

    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    build: Build | None = None
    kernels: Path | None = None
    sources_digest: str = ""


_process = _Process()


def print_to_stderr(message: str) -> None:
    """The default `report`: one line on stderr."""
    print(f"kdtree_nb: {message}", file=sys.stderr, flush=True)


def load(kernels: Path | None = None, cache: Path | None = None, report: Report = print_to_stderr) -> Build:
    """Load the native kernels, compiling them when the cache has no library for these sources and this machine.

    Loads once per process, from any thread; later calls return the same Build. `kernels` is the source folder (default
    `kernels_dir()`), `cache` the folder of compiled libraries (default `cache_dir()`); `report` receives progress
    lines. Raises KernelBuildError when the kernels cannot be built, KernelUnavailableError when the sources have
    changed since this process loaded them.
    """
    with _process.lock:
        root = kernels or _process.kernels or kernels_dir()
        digest = sources_digest(root)
        if _process.build is None:
            _process.build = _load(root, cache or cache_dir(), report)
            _process.kernels, _process.sources_digest = root, digest
        elif digest != _process.sources_digest:
            raise KernelUnavailableError(
                f"native kernels: the sources in {root} have changed since this process loaded {_process.build.path}; "
                "a process can load them once. Restart the kernel (or the Python process) to compile the new ones."
            )
        return _process.build


def require(device: torch.device) -> None:
    """Load the kernels, and raise KernelUnavailableError if there are none for this device."""
    build = load()
    reason = "" if device.type in ("cpu", "cuda") else "expected a device of kind cpu or cuda"
    if device.type == "cuda":
        from kdtree_nb.native.devices import why_not_on  # imports torch

        reason = build.no_cuda or why_not_on(device)
    if not reason:
        return
    raise KernelUnavailableError(f"native kernels: none for device {str(device)!r}. {reason}")


def kernels_dir() -> Path:
    """The folder of kernel sources: `kernels/` beside the package in a checkout, else inside the installed package.
    Raises KernelBuildError where there is none."""
    package = Path(__file__).resolve().parents[1]
    candidates = (package.parent / "kernels", package / "_kernels")
    for folder in candidates:
        if (folder / "op_args.h").is_file():
            return folder
    raise KernelBuildError(
        f"native kernels: no sources (op_args.h) in {' or '.join(map(str, candidates))}. "
        "Reinstall kdtree_nb, or run from a complete checkout."
    )


def cache_dir() -> Path:
    """The folder of compiled libraries: $KDTREE_CACHE_DIR, else $XDG_CACHE_HOME/kdtree_nb, else ~/.cache/kdtree_nb.

    Raises KernelBuildError on a home folder (~name) that cannot be found.
    """
    chosen = os.environ.get("KDTREE_CACHE_DIR")
    if chosen:
        try:
            return Path(chosen).expanduser().absolute()
        except RuntimeError as error:
            raise KernelBuildError(
                f"native kernels: KDTREE_CACHE_DIR: expected a folder, got {chosen!r}: {error}. Set it to a path."
            ) from error
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache").absolute() / "kdtree_nb"


def device_kinds() -> tuple[str, ...]:
    """Devices whose kernels this torch can hold. A CPU build of torch refuses `.cu` sources even where nvcc exists."""
    import torch

    return ("cpu", "cuda") if torch.version.cuda else ("cpu",)


def sources(root: Path, device: str) -> list[Path]:
    """The files that one device adds to the library. The stem is the operation; `.cu` and `bind/cuda_*` are CUDA's."""
    cpp = [*root.glob("*.cpp"), *root.glob("bind/*.cpp")]
    of_cuda = [path for path in cpp if path.name.startswith("cuda_")] + [*root.glob("*.cu")]
    chosen = of_cuda if device == "cuda" else [path for path in cpp if path not in of_cuda]
    return sorted(chosen)


def sources_digest(root: Path) -> str:
    """Hex digest of names and contents of all sources and headers, without those of the C ABI."""
    headers = [*root.rglob("*.h"), *(root.rglob("*.cuh") if "cuda" in device_kinds() else ())]
    files = {*headers, *(path for device in device_kinds() for path in sources(root, device))}
    return files_digest(root, [path for path in files if path.parent.name != "capi"])


def files_digest(root: Path, files: Iterable[Path]) -> str:
    """Hex digest of names, relative to `root`, and contents of files in any order."""
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path.relative_to(root)}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def namespace_of(root: Path, toolchain: Toolchain) -> str:
    """`kdtree_<hash10>`: library name and torch namespace of these sources on this machine."""
    import torch

    cuda = toolchain.cuda
    of_cuda = (cuda.nvcc_version, *cuda.flags) if isinstance(cuda, CudaToolchain) else ()
    parts = (sources_digest(root), *FLAGS, *LINK_FLAGS, toolchain.compiler, toolchain.compiler_version,
             torch.__version__, str(torch.version.git_version), toolchain.cpu, *of_cuda)  # fmt: skip
    return "kdtree_" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:10]


def _load(root: Path, cache: Path, report: Report) -> Build:
    build = build_library(root, cache, report)
    if build.compile_s == 0.0:  # a fresh build is already loaded: cpp_extension.load builds and loads
        import torch

        try:
            torch.ops.load_library(str(build.path))
        except OSError as error:
            raise KernelBuildError(
                f"native kernels: {build.path} does not load: {error.__cause__ or error}. "
                f"Delete {build.path.parent} and try again."
            ) from error
    return build


def build_library(root: Path, cache: Path, report: Report, lock_timeout_s: float = LOCK_TIMEOUT_S) -> Build:
    """The library of the sources in `root`, compiled under `cache` unless it is complete there already."""
    toolchain = find_toolchain()
    name = namespace_of(root, toolchain)
    no_cuda = "" if isinstance(toolchain.cuda, CudaToolchain) else str(toolchain.cuda)

    def compile_into(folder: Path) -> float:
        return _compile(root, toolchain, name, folder, report)

    library, compile_s = build_once(cache, name, compile_into, report, lock_timeout_s)
    return Build(name, library, compile_s, no_cuda)


def _compile(root: Path, toolchain: Toolchain, name: str, folder: Path, report: Report) -> float:
    import torch

    cuda = toolchain.cuda if isinstance(toolchain.cuda, CudaToolchain) else None
    files = [path for device in (("cpu", "cuda") if cuda else ("cpu",)) for path in sources(root, device)]
    _check_stems(root, files)
    jobs = num_jobs(2 if cuda is None else min(8, os.cpu_count() or 2))
    seconds = {".cpp": _KERNEL_S, ".cu": _CUDA_S * len(cuda.archs) if cuda else 0.0}
    work_s = sum(_BINDING_S if path.parent.name == "bind" else seconds[path.suffix] for path in files)
    report(f"compiling native kernels (about {work_s / jobs:.0f} s, once) into {folder}")
    start = time.perf_counter()
    build_dir = Path(tempfile.mkdtemp(prefix="build-", dir=folder))
    try:
        library = _run_compiler(files, toolchain, cuda, name, build_dir, jobs)
        compile_s = time.perf_counter() - start
        record = {"compile_s": round(compile_s, 1), "compiler": toolchain.compiler_version, "torch": torch.__version__}
        (folder / "build.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
        os.replace(library, folder / f"{name}.so")
    finally:
        shutil.rmtree(build_dir, ignore_errors=True)
    return compile_s


def num_jobs(usual: int = 2) -> int:
    """Compilers to run at once: $MAX_JOBS, else `usual`: few, since each takes more than 1 GB."""
    chosen = os.environ.get("MAX_JOBS", "")
    return int(chosen) if chosen.isdigit() and int(chosen) > 0 else usual


def _run_compiler(
    files: list[Path], toolchain: Toolchain, cuda: CudaToolchain | None, name: str, build_dir: Path, jobs: int
) -> str:
    """Compile, link and load. Returns the library's path, which has another stem when this process tried before."""
    path = os.pathsep.join([str(toolchain.ninja_dir), os.environ.get("PATH", ""), str(build_dir)])
    variables = {"PATH": path, "CXX": as_one_word(toolchain.compiler, build_dir), "MAX_JOBS": str(jobs)}
    if cuda:
        variables |= {"CUDA_HOME": str(cuda.home), "PYTORCH_NVCC": str(cuda.nvcc)}
    with environment(**variables):
        from torch.utils import cpp_extension  # costs 0.2 s, is needed only to compile, and looks for CUDA_HOME

        try:
            return cpp_extension.load(
                name,
                [str(file) for file in files],
                extra_cflags=[*FLAGS, f"-DKDTREE_NS={name}"],
                extra_cuda_cflags=cuda.flags if cuda else None,
                extra_ldflags=list(LINK_FLAGS),
                build_directory=str(build_dir),
                is_python_module=False,
            )
        except (RuntimeError, OSError) as error:
            raise KernelBuildError(
                f"native kernels: compiling with {toolchain.compiler_version} failed:\n"
                f"{_shorten(str(error.__cause__ if isinstance(error, OSError) and error.__cause__ else error))}"
            ) from error


def _shorten(text: str, width: int = 500) -> str:
    """Compiler output without its very long command lines."""
    return "\n".join(line if len(line) <= width else line[:width] + " …" for line in text.splitlines())


def _check_stems(root: Path, files: list[Path]) -> None:
    stems = [(path.stem, path.suffix) for path in files]
    twice = sorted({stem for stem, suffix in stems if stems.count((stem, suffix)) > 1})
    if not files:
        raise KernelBuildError(f"native kernels: no sources in {root}. Reinstall kdtree_nb.")
    if twice:
        raise KernelBuildError(
            f"native kernels: stems used twice in {root}: {twice}. Rename one of each; objects share names."
        )
