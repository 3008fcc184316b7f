"""The build on tiny kernel folders: one C++ file without torch headers compiles in about a second."""

from __future__ import annotations

import ctypes
import dataclasses
import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from kdtree_nb.errors import KernelBuildError, KernelUnavailableError
from kdtree_nb.native import build, toolchain

ROOT = Path(__file__).parents[2]


@pytest.fixture
def kernels(tmp_path):
    """A kernel folder whose only function returns the number in its header."""
    root = tmp_path / "kernels"
    root.mkdir()
    (root / "op_args.h").write_text("#pragma once\nconstexpr int kAnswer = 42;\n")
    (root / "answer.cpp").write_text('#include "op_args.h"\nextern "C" int answer() { return kAnswer; }\n')
    return root


@pytest.fixture
def fresh(monkeypatch):
    """A process that has not loaded any kernels, as far as `build.load` knows."""
    monkeypatch.setattr(build, "_process", build._Process())


def answer_of(result: build.Build) -> int:
    return ctypes.CDLL(str(result.path)).answer()


def test_compiles_once_then_loads_from_the_cache(kernels, tmp_path):
    lines = []
    first = build.build_library(kernels, tmp_path / "cache", lines.append)
    assert answer_of(first) == 42 and first.compile_s > 0
    assert len(lines) == 1 and "compiling native kernels (about" in lines[0] and "once" in lines[0]
    second = build.build_library(kernels, tmp_path / "cache", lines.append)
    assert second == dataclasses.replace(first, compile_s=0.0) and len(lines) == 1
    left = {path.name for path in first.path.parent.iterdir()}
    assert left == {first.path.name, "build.json", "lock"}


def test_leaves_the_environment_alone(kernels, tmp_path):
    before = dict(os.environ)
    build.build_library(kernels, tmp_path / "cache", print)
    assert dict(os.environ) == before


def test_name_depends_on_everything_that_goes_in(kernels, monkeypatch):
    tools = toolchain.find_toolchain()
    name = build.namespace_of(kernels, tools)
    names = {name, *(build.namespace_of(kernels, dataclasses.replace(tools, **{field: "other"}))
                     for field in ("compiler", "compiler_version", "cpu"))}  # fmt: skip
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    names.add(build.namespace_of(kernels, tools))
    monkeypatch.undo()
    monkeypatch.setattr(torch, "__version__", "0.0.0")
    names.add(build.namespace_of(kernels, tools))
    monkeypatch.undo()
    assert build.namespace_of(kernels, tools) == name
    (kernels / "op_args.h").write_text("constexpr int kAnswer = 43;\n")
    names.add(build.namespace_of(kernels, tools))
    assert len(names) == 7 and all(name.startswith("kdtree_") and len(name) == 17 for name in names)


def test_edited_header_gives_a_new_library(kernels, tmp_path):
    first = build.build_library(kernels, tmp_path / "cache", print)
    (kernels / "op_args.h").write_text("constexpr int kAnswer = 43;\n")
    second = build.build_library(kernels, tmp_path / "cache", print)
    assert (answer_of(first), answer_of(second)) == (42, 43) and first.path != second.path


def test_folders_with_spaces(kernels, tmp_path):
    spaced = kernels.rename(tmp_path / "my kernels")
    assert answer_of(build.build_library(spaced, tmp_path / "my cache", print)) == 42


def test_a_compiler_with_launcher_and_options(kernels, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", f"env KDTREE_TEST=1 {toolchain.find_compiler()} -DOTHER='a b'")
    assert answer_of(build.build_library(kernels, tmp_path / "the cache", print)) == 42


def test_a_path_that_cannot_be(kernels, tmp_path):
    with pytest.raises(KernelBuildError, match="Set KDTREE_CACHE_DIR"):
        build.build_library(kernels, tmp_path / ("x" * 300), print)


def test_number_of_jobs(monkeypatch):
    monkeypatch.delenv("MAX_JOBS", raising=False)
    assert build.num_jobs() == 2
    assert build.num_jobs(8) == 8
    for text, expected in (("5", 5), ("0", 2), ("many", 2)):
        monkeypatch.setenv("MAX_JOBS", text)
        assert build.num_jobs() == expected


def test_sources_of_a_device(kernels):
    (kernels / "bind").mkdir()
    for name in ("answer.cu", "bind/cpu_tree.cpp", "bind/cuda_tree.cpp", "bind/schema.cpp"):
        (kernels / name).write_text("")
    names = {device: [path.name for path in build.sources(kernels, device)] for device in ("cpu", "cuda")}
    assert names["cpu"] == ["answer.cpp", "cpu_tree.cpp", "schema.cpp"]
    assert names["cuda"] == ["answer.cu", "cuda_tree.cpp"]
    assert build.device_kinds() == (("cpu", "cuda") if torch.version.cuda else ("cpu",))


def test_compiler_error_is_shown_and_leaves_nothing_to_load(kernels, tmp_path):
    good = (kernels / "answer.cpp").read_text()
    (kernels / "answer.cpp").write_text(good + "int broken() { return undeclared_name; }\n")
    for _ in range(2):  # the second attempt must not find what the first left
        with pytest.raises(KernelBuildError, match=r"(?s)compiling with .* failed.*answer.cpp:3.*undeclared_name"):
            build.build_library(kernels, tmp_path / "cache", print)
    assert not list((tmp_path / "cache").rglob("*.so")) and not list((tmp_path / "cache").rglob("*.o"))
    (kernels / "answer.cpp").write_text(good)
    assert answer_of(build.build_library(kernels, tmp_path / "cache", print)) == 42


def test_missing_function_is_a_build_error(kernels, tmp_path):
    (kernels / "answer.cpp").write_text('int missing_kernel();\nextern "C" int answer() { return missing_kernel(); }\n')
    with pytest.raises(KernelBuildError, match="missing_kernel"):
        build.build_library(kernels, tmp_path / "cache", print)


def test_no_compiler(kernels, tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KernelBuildError) as error:
        build.build_library(kernels, tmp_path / "cache", print)
    assert all(text in str(error.value) for text in ("c++, g++, clang++", str(tmp_path), "apt install g++", "CXX"))


def test_cache_that_cannot_be_written(kernels, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(KernelBuildError, match="cannot be written.*KDTREE_CACHE_DIR"):
        build.build_library(kernels, tmp_path / "cache", print)


def test_read_only_cache(kernels, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(stat.S_IRUSR | stat.S_IXUSR)
    if os.access(cache, os.W_OK):  # root writes anywhere, except into the kernel's own file systems
        cache = Path("/sys/kernel/kdtree_nb")
    with pytest.raises(KernelBuildError, match="cannot be written.*KDTREE_CACHE_DIR"):
        build.build_library(kernels, cache, print)


def test_complete_library_in_a_read_only_cache(kernels, tmp_path):
    first = build.build_library(kernels, tmp_path / "cache", print)
    (first.path.parent / "lock").unlink()
    first.path.parent.chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert build.build_library(kernels, tmp_path / "cache", print).path == first.path
    assert not (first.path.parent / "lock").exists()  # nothing was written
    first.path.parent.chmod(stat.S_IRWXU)


def test_stale_lock_and_leftovers_of_a_dead_build(kernels, tmp_path):
    folder = tmp_path / "cache" / build.namespace_of(kernels, toolchain.find_toolchain())
    (folder / "build-dead").mkdir(parents=True)
    (folder / "build-dead" / "lock").touch()  # what torch 2.13 waits for without end
    (folder / "build-dead" / f"{folder.name}.so").write_bytes(b"half a library")
    (folder / "lock").write_text("999999999\n")
    lines = []
    assert answer_of(build.build_library(kernels, tmp_path / "cache", lines.append)) == 42
    assert "left by a build that did not finish" in lines[0] and not list(folder.glob("build-*"))


def test_lock_held_by_a_living_process(kernels, tmp_path):
    folder = tmp_path / "cache" / build.namespace_of(kernels, toolchain.find_toolchain())
    folder.mkdir(parents=True)
    lines = []
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("4321\n")
        lock.flush()
        with pytest.raises(KernelBuildError, match="process 4321 has held the build lock .*KDTREE_CACHE_DIR"):
            build.build_library(kernels, tmp_path / "cache", lines.append, lock_timeout_s=0.2)
    assert lines == ["waiting for process 4321, which is compiling the native kernels"]


def test_damaged_library(kernels, tmp_path, fresh):
    first = build.build_library(kernels, tmp_path / "cache", print)
    damaged = first.path.with_suffix(".damaged")
    damaged.write_bytes(b"not a library")
    damaged.replace(first.path)  # a new file: the old one is mapped into this process
    with pytest.raises(KernelBuildError, match=f"does not load.*Delete {first.path.parent}"):
        build.load(kernels, tmp_path / "cache", print)


def test_folder_without_sources(tmp_path):
    (tmp_path / "kernels").mkdir()
    with pytest.raises(KernelBuildError, match="no sources"):
        build.build_library(tmp_path / "kernels", tmp_path / "cache", print)


def test_stems_must_differ(kernels, tmp_path):
    (kernels / "bind").mkdir()
    (kernels / "bind" / "answer.cpp").write_text("")
    with pytest.raises(KernelBuildError, match=r"stems used twice.*'answer'"):
        build.build_library(kernels, tmp_path / "cache", print)


def test_load_happens_once_from_any_thread(kernels, tmp_path, fresh):
    lines, results = [], []
    threads = [threading.Thread(target=lambda: results.append(build.load(kernels, tmp_path, lines.append)))
               for _ in range(4)]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and all(result is results[0] for result in results) and len(lines) == 1
    assert build.load() is results[0]


def test_changed_sources_ask_for_a_restart(kernels, tmp_path, fresh):
    build.load(kernels, tmp_path / "cache", print)
    header = kernels / "op_args.h"
    original = header.read_text()
    header.write_text("constexpr int kAnswer = 43;\n")
    with pytest.raises(KernelUnavailableError, match="have changed since.*Restart"):
        build.load()
    header.write_text(original)
    assert build.load().namespace


def test_cache_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KDTREE_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert build.cache_dir() == tmp_path / ".cache" / "kdtree_nb"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert build.cache_dir() == tmp_path / "xdg" / "kdtree_nb"
    monkeypatch.setenv("KDTREE_CACHE_DIR", "~/mine")
    assert build.cache_dir() == tmp_path / "mine"


def test_kernels_dir_of_a_checkout_and_of_an_installation(monkeypatch, tmp_path):
    assert build.kernels_dir() == ROOT / "kernels"
    package = tmp_path / "site-packages" / "kdtree_nb"
    monkeypatch.setattr(build, "__file__", str(package / "native" / "build.py"))
    with pytest.raises(KernelBuildError, match="no sources .*Reinstall"):
        build.kernels_dir()
    (package / "_kernels").mkdir(parents=True)
    (package / "_kernels" / "op_args.h").touch()
    assert build.kernels_dir() == package / "_kernels"


LOADER = "import sys, pathlib; from kdtree_nb import native; native.load(*map(pathlib.Path, sys.argv[1:]))"


def start_loader(kernels: Path, cache: Path, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", LOADER, str(kernels), str(cache)], cwd=ROOT, env={**os.environ, **environment},
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def test_two_processes_compile_once(kernels, tmp_path):
    loaders = [start_loader(kernels, tmp_path / "cache") for _ in range(2)]
    texts = [loader.communicate(timeout=120)[1] for loader in loaders]
    assert [loader.returncode for loader in loaders] == [0, 0], texts
    assert sum(text.count("compiling native kernels") for text in texts) == 1, texts


def test_killed_build_blocks_nobody(kernels, tmp_path, monkeypatch):
    slow = tmp_path / "slow"
    compiler = tmp_path / "c++"
    compiler.write_text(
        f'#!/bin/sh\n[ -e {slow} ] && case "$*" in *" -c "*) sleep 60;; esac\nexec {shutil.which("c++")} "$@"\n'
    )
    compiler.chmod(0o755)
    slow.touch()
    loader = start_loader(kernels, tmp_path / "cache", CXX=str(compiler))
    try:
        deadline = time.monotonic() + 60
        while not list((tmp_path / "cache").glob("*/build-*/build.ninja")):
            assert time.monotonic() < deadline and loader.poll() is None, "the build never started"
            time.sleep(0.05)
        loader.kill()
        loader.wait(timeout=30)
        slow.unlink()
        monkeypatch.setenv("CXX", str(compiler))
        assert answer_of(build.build_library(kernels, tmp_path / "cache", print, lock_timeout_s=0.0)) == 42
    finally:
        os.killpg(loader.pid, signal.SIGKILL)  # ninja outlives its parent
        loader.stderr.close()


def test_a_home_that_cannot_be_found(monkeypatch):
    monkeypatch.setenv("KDTREE_CACHE_DIR", "~no-such-user/cache")
    with pytest.raises(KernelBuildError, match="KDTREE_CACHE_DIR: expected a folder"):
        build.cache_dir()
