"""The C program kernels/capi/example.c: plain C99 without a warning, linked to the library and run; and `make capi`."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from kdtree_nb.errors import KernelBuildError
from kdtree_nb.native import capi, capi_build, toolchain

ROOT = Path(__file__).parents[2]
FILES = [str(ROOT / "data/goldens/tiny.kdtr"), str(ROOT / "data/tiny.kdtr")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("capi") / "a folder"
    assert capi_build.install(made, report=print) == [made / "libkdtree.so", made / "example"]
    return made


def run(program, *arguments):
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=120, cwd="/")


def test_is_c99_without_a_warning():
    command = ["cc", "-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{ROOT}/kernels/capi"]
    done = subprocess.run([*command, str(ROOT / "kernels/capi/example.c")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_agrees_with_the_goldens(folder, device):
    done = run(folder / "example", *FILES, "--device", device.type)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "all ok" and done.stdout.count("\nok ") >= 10 and "FAILED" not in done.stdout


def test_damaged_goldens_end_it_with_the_reason(folder, tmp_path):
    raw = bytearray(Path(FILES[0]).read_bytes())
    raw[-1] ^= 1  # of the last tensor, which the program does not read
    (tmp_path / "unread.kdtr").write_bytes(raw)
    assert run(folder / "example", str(tmp_path / "unread.kdtr"), FILES[1]).returncode == 0
    (tmp_path / "cut.kdtr").write_bytes(raw[:-1])
    done = run(folder / "example", str(tmp_path / "cut.kdtr"), FILES[1])
    assert done.returncode == 1 and f"KDTREE_BAD_FILE: {tmp_path}/cut.kdtr: tensor" in done.stderr
    done = run(folder / "example", FILES[1], FILES[1])
    assert done.returncode == 1 and "tensor 'read_config.tokens': name: expected a tensor of this file" in done.stderr


def test_usage(folder):
    for arguments in ([], FILES[:1], [*FILES, "--device", "tpu"]):
        done = run(folder / "example", *arguments)
        assert done.returncode == 2 and done.stderr.startswith("usage: ")


def test_asked_for_a_gpu_that_is_not_there(folder):
    if not capi.load().build.no_cuda:
        pytest.skip("this library has CUDA kernels")
    done = run(folder / "example", *FILES, "--device", "cuda")
    assert done.returncode == 1 and done.stderr.startswith(
        "KDTREE_UNAVAILABLE: device: expected KDTREE_CPU in a library"
    )


def test_is_clean_under_the_sanitizers(tmp_path):
    """The C ABI and the program itself with the address and undefined-behaviour sanitizers, kernels as they are."""
    flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1"]
    kernels = ROOT / "kernels"
    program = tmp_path / "example"
    compiler = toolchain.find_compiler().split()
    objects = []
    for source in [*sorted(kernels.glob("capi/*.cpp")), *sorted(kernels.glob("tree_*.cpp"))]:
        objects.append(str(tmp_path / f"{source.stem}.o"))
        done = subprocess.run([*compiler, *capi_build.FLAGS, *flags, "-c", str(source), "-o", objects[-1]],
                              capture_output=True, text=True)  # fmt: skip
        if "sanitize" in done.stderr and done.returncode:
            pytest.skip("the compiler has no sanitizers")
        assert done.returncode == 0, done.stderr
    for source in capi_build.sources(kernels, with_cuda=False):
        if str(tmp_path / f"{source.stem}.o") not in objects:
            objects.append(str(tmp_path / f"{source.stem}.o"))
            subprocess.run([*compiler, *capi_build.FLAGS, "-c", str(source), "-o", objects[-1]], check=True)
    subprocess.run(["cc", "-std=c99", *flags, f"-I{kernels}/capi", "-c", str(kernels / "capi/example.c"), "-o",
                    str(tmp_path / "example.o")], check=True)  # fmt: skip
    link = [*objects, str(tmp_path / "example.o"), "-lm", "-pthread", "-o", str(program)]
    subprocess.run([*compiler, *flags, *link], check=True)
    done = run(program, *FILES)
    assert done.returncode == 0 and done.stdout.endswith("all ok\n"), done.stdout + done.stderr


def test_compiles_once_and_names_what_fails(tmp_path):
    root, cache = tmp_path / "kernels", tmp_path / "cache"
    (root / "capi").mkdir(parents=True)
    (root / "op_args.h").write_text("")
    (root / "capi" / "a.cpp").write_text('extern "C" __attribute__((visibility("default"))) int one() { return 1; }\n')
    lines = []
    first = capi_build.build_capi(root, cache, lines.append)
    again = capi_build.build_capi(root, cache, lines.append)
    assert first.path == again.path and first.compile_s > 0 == again.compile_s and len(lines) == 1
    (root / "op_args.h").write_text("// changed\n")
    assert capi_build.build_capi(root, cache, lines.append).path != first.path
    (root / "capi" / "a.cpp").write_text("int one() { return undeclared_name; }\n")
    with pytest.raises(KernelBuildError, match="(?s)C library: .*a.cpp.* failed:.*undeclared_name"):
        capi_build.build_capi(root, cache, lines.append)
    assert not list(cache.rglob("build-*"))


def test_main_says_how_it_is_used(capsys):
    for arguments in ([], ["a", "b"], ["--help"]):
        with pytest.raises(SystemExit, match="usage: "):
            capi_build.main(arguments)


def test_with_nvcc_the_library_links_with_cuda_kernels(tmp_path, monkeypatch):
    """The CUDA part of the C ABI compiles and links, for a GPU that need not be there; kernels are stand-ins."""
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc on PATH: the CUDA part of the C ABI was not compiled")
    kernels, root = ROOT / "kernels", tmp_path / "kernels"
    shutil.copytree(kernels / "capi", root / "capi")
    for header in kernels.glob("*.h"):
        shutil.copy(header, root)
    text = (kernels / "op_args.h").read_text()
    lines = ['#include "op_args.h"', "namespace kdtree {"]
    for line in text.splitlines():
        if line.startswith(("int ", "int64_t ")) and "Args&" in line and line.endswith(");"):
            lines.append(line.removesuffix(";") + " { return 0; }")
    (root / "stand_ins.cpp").write_text("\n".join([*lines, "}", ""]))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0 12.0")
    built = capi_build.build_capi(root, tmp_path / "cache", print)
    assert built.no_cuda == ""
    library = capi.Library(built)
    if not os.path.exists("/dev/nvidiactl"):
        with pytest.raises(Exception, match="expected an NVIDIA driver|expected a GPU, got none"):
            library.argmax(logits=np.zeros((1, 4), np.float32), device=capi.Device("cuda"))
