"""Build the C library: the kernels behind kernels/capi/kdtree.h, compiled once into the cache, without torch.

`python -m kdtree_nb.native.capi_build FOLDER` puts libkdtree.so into a folder and compiles the example beside it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kdtree_nb.errors import KernelBuildError, KernelUnavailableError
from kdtree_nb.native import build, toolchain
from kdtree_nb.native.cuda_toolchain import CudaToolchain, find_cuda_toolchain
from kdtree_nb.native.guard import Report, build_once

FLAGS = ("-std=c++17", *build.FLAGS, "-fPIC", "-fvisibility=hidden", "-DKDTREE_BUILD")
"""Compiler flags of every C++ source: those of the torch extension, so that both give the same bits."""


@dataclasses.dataclass(frozen=True)
class CapiBuild:
    """The C library.

    path:      of the file
    kernels:   the folder of its sources; kernels/capi holds its headers
    compile_s: seconds that compiling it took (0.0 from the cache)
    no_cuda:   why it has no kernels for GPUs; empty if it has
    """

    path: Path
    kernels: Path
    compile_s: float
    no_cuda: str


@dataclasses.dataclass(frozen=True)
class _Tools:
    """What the library is compiled with: the C++ compiler's command, and CUDA's if there are to be kernels for GPUs."""

    compiler: list[str]
    cuda: CudaToolchain | None

    def object_of(self, source: Path, target: Path) -> list[str]:
        """The command that compiles one source."""
        if source.suffix == ".cu":
            options = [*self.cuda.flags, "-Xcompiler=-fPIC,-fvisibility=hidden", "-DKDTREE_BUILD"]
            return [str(self.cuda.nvcc), *options, "-c", str(source), "-o", str(target)]
        options = [*FLAGS, *(["-DKDTREE_WITH_CUDA"] if self.cuda else [])]
        return [*self.compiler, *options, "-c", str(source), "-o", str(target)]

    def link(self, objects: list[Path], target: Path) -> list[str]:
        """The command that makes the library; nvcc brings the CUDA runtime with it, as part of the library."""
        files = [*map(str, objects), "-o", str(target)]
        if self.cuda:
            return [str(self.cuda.nvcc), *self.cuda.flags, "-shared", "-Xcompiler=-pthread",
                    "-Xlinker=--no-undefined", *files]  # fmt: skip
        return [*self.compiler, "-shared", *build.LINK_FLAGS, *files]


def build_capi(
    kernels: Path | None = None, cache: Path | None = None, report: Report = build.print_to_stderr
) -> CapiBuild:
    """The C library of the sources in `kernels` (default `build.kernels_dir()`), compiled under `cache` (default
    `build.cache_dir()`) unless it is complete there already. With CUDA kernels where `find_cuda_toolchain` finds all
    that they need. Raises KernelBuildError."""
    root = kernels or build.kernels_dir()
    compiler = toolchain.find_compiler()
    no_cuda, cuda = "", None
    try:
        cuda = find_cuda_toolchain(for_torch=False)
    except (KernelBuildError, KernelUnavailableError) as error:
        no_cuda = str(error)
    tools = _Tools(shlex.split(compiler), cuda)
    files = sources(root, with_cuda=cuda is not None)
    headers = [*root.glob("*.h"), *root.glob("capi/*.h"), *(root.glob("*.cuh") if cuda else ())]
    commands = [tools.link([], Path()), tools.object_of(Path("a.cpp"), Path())]
    commands += [tools.object_of(Path("a.cu"), Path())] if cuda else []
    versions = [toolchain.compiler_version(compiler), cuda.nvcc_version if cuda else "", toolchain.cpu_digest()]
    parts = [build.files_digest(root, [*files, *headers]), *versions, *(word for words in commands for word in words)]
    name = "kdtree_capi_" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:10]

    def compile_into(folder: Path) -> float:
        return _compile(root, files, tools, name, folder, report)

    path, compile_s = build_once(cache or build.cache_dir(), name, compile_into, report)
    return CapiBuild(path, root, compile_s, no_cuda)


def sources(root: Path, with_cuda: bool) -> list[Path]:
    """The files of the library: every kernel and the C ABI, nothing of bind/."""
    patterns = ("*.cpp", "*.cu") if with_cuda else ("*.cpp",)
    return sorted(path for folder in (root, root / "capi") for pattern in patterns for path in folder.glob(pattern))


def _compile(root: Path, files: list[Path], tools: _Tools, name: str, folder: Path, report: Report) -> float:
    report(f"compiling the C library (once) into {folder}")
    start = time.perf_counter()
    build_dir = Path(tempfile.mkdtemp(prefix="build-", dir=folder))
    try:
        objects = [build_dir / ("_".join(file.relative_to(root).parts) + ".o") for file in files]
        jobs = build.num_jobs(min(8, os.cpu_count() or 2))
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(_run, map(tools.object_of, files, objects)))
        _run(tools.link(objects, build_dir / "library.so"))
        os.replace(build_dir / "library.so", folder / f"{name}.so")
    finally:
        shutil.rmtree(build_dir, ignore_errors=True)
    return time.perf_counter() - start


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise KernelBuildError(f"C library: `{shlex.join(command)}` failed:\n{done.stdout}{done.stderr}")


def install(folder: Path, report: Report = build.print_to_stderr) -> list[Path]:
    """Copy the library to folder/libkdtree.so and compile folder/example against it. Returns both paths."""
    built = build_capi(report=report)
    folder.mkdir(parents=True, exist_ok=True)
    library, example = folder / "libkdtree.so", folder / "example"
    shutil.copy(built.path, library)
    compiler = [os.environ.get("CC") or "cc", "-std=c99", "-O2", "-Wall", "-Wextra"]
    source = built.kernels / "capi" / "example.c"
    link = [f"-L{folder}", "-lkdtree", "-lm", "-Wl,-rpath,$ORIGIN"]
    _run([*compiler, f"-I{source.parent}", str(source), *link, "-o", str(example)])
    if built.no_cuda:
        report(f"without kernels for GPUs. {built.no_cuda}")
    return [library, example]


def main(arguments: list[str]) -> None:
    """`python -m kdtree_nb.native.capi_build FOLDER`"""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise SystemExit("usage: python -m kdtree_nb.native.capi_build FOLDER")
    try:
        print(*install(Path(arguments[0])), sep="\n")
    except KernelBuildError as error:
        raise SystemExit(f"kdtree_nb: {error}") from error


if __name__ == "__main__":
    main(sys.argv[1:])
