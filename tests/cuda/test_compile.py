"""Every CUDA kernel compiles for Hopper and Blackwell; the compiler's report and the machine code are as they must be.

Needs nvcc, no GPU. The machine code is looked at where a disassembler is found, see `find_disassembler`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from kdtree_nb.errors import KernelBuildError
from kdtree_nb.native.cuda_toolchain import FLAGS, find_nvcc, target

KERNELS = Path(__file__).parents[2] / "kernels"
SOURCES = sorted(path.name for path in KERNELS.glob("*.cu"))
MAX_SHARED_BYTES = 99 * 1024
"""The most shared memory that a block may have on sm_120. What is dynamic the kernels assert when they are compiled."""

ILLEGAL_COPY = re.compile(r"LDGSTS\.\S+\s+\[[^\]]*\bUR\d")
"""An asynchronous copy whose shared address is a register plus a uniform one: it died as illegal on sm_90."""

WRONG_MINIMUM = re.compile(r"VIMNMX\S*\s+U?R\w+,\s*!?U?P")
"""A minimum that also writes a predicate. ptxas 13.0 makes the same one on sm_90 of max(min(a, b), 0) == a and of
max(min(a, b), 0) == b; with b a stage of linear was filled with more than it had announced."""


@pytest.fixture(scope="session")
def nvcc() -> Path:
    try:
        return find_nvcc()
    except KernelBuildError as error:
        pytest.skip(f"no kernel was compiled. {error}")


def find_disassembler(nvcc: Path) -> str | None:
    """On PATH, beside nvcc, or in the environment's own packages."""
    folders = [*os.environ.get("PATH", "").split(os.pathsep), str(nvcc.parent)]
    folders += [str(path) for path in Path(sysconfig.get_path("purelib"), "nvidia").glob("cu*/bin")]
    return shutil.which("cuobjdump", path=os.pathsep.join(folders))


def test_there_are_kernels():
    assert {"linear.cu", "moe_experts.cu", "verify_attn.cu", "draft_topk.cu", "tree_build.cu"} <= set(SOURCES)


@pytest.mark.parametrize("arch", [90, 120])
@pytest.mark.parametrize("source", SOURCES)
def test_compiles_without_spills_within_the_shared_memory(source, arch, nvcc, tmp_path):
    cubin = tmp_path / "kernel.cubin"
    gencode = f"-gencode=arch=compute_{target(arch)},code=sm_{target(arch)}"
    command = [str(nvcc), *FLAGS, gencode, "-cubin", "-Xptxas=-v", "-o", str(cubin), str(KERNELS / source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    report = done.stdout + done.stderr
    assert done.returncode == 0, report
    assert "warning" not in report, report
    num_kernels = report.count("Compiling entry function")
    spilled = [int(number) for number in re.findall(r"(\d+) bytes spill (?:stores|loads)", report)]
    used = [line for line in report.splitlines() if re.search(r"Used \d+ registers", line)]
    shared = [int(number) for line in used for number in re.findall(r"(\d+) bytes smem", line)]
    assert num_kernels > 0 and len(used) == num_kernels and len(spilled) >= 2 * num_kernels
    assert set(spilled) == {0}
    assert max(shared, default=0) <= MAX_SHARED_BYTES
    disassembler = find_disassembler(nvcc)
    if disassembler:
        check_machine_code(disassembler, cubin)


def check_machine_code(disassembler: str, cubin: Path) -> None:
    near = {**os.environ, "PATH": os.pathsep.join([str(Path(disassembler).parent), os.environ.get("PATH", "")])}
    command = [disassembler, "-sass", str(cubin)]  # it calls nvdisasm
    code = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True, env=near)
    instructions = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", code.stdout)
    assert len(instructions) > 20
    assert [text for text in instructions if ILLEGAL_COPY.search(text)] == []
    assert [text for text in instructions if WRONG_MINIMUM.search(text)] == []


def test_the_illegal_copy_is_recognised():
    assert ILLEGAL_COPY.search("LDGSTS.E.BYPASS.LTC128B.128 [R4+UR0+0x800], desc[UR16][R2.64]")
    assert not ILLEGAL_COPY.search("@!P1 LDGSTS.E.BYPASS.128 [R4+0x800], desc[UR16][R2.64+0x10]")
    assert not ILLEGAL_COPY.search("LDGSTSBAR.64.ARVCNT [UR4]")


def test_the_wrong_minimum_is_recognised():
    assert WRONG_MINIMUM.search("VIMNMX.RELU R6, P2, P2, R6, 0x2, PT")
    assert not WRONG_MINIMUM.search("VIMNMX.RELU R9, R2, 0x2, PT")
    assert not WRONG_MINIMUM.search("@!P1 VIMNMX R9, R2, UR6, !PT")
    assert not WRONG_MINIMUM.search("VIADDMNMX.RELU R14, R11, -R0, 0x8, PT")


def test_the_machine_code_was_looked_at(nvcc):
    if find_disassembler(nvcc) is None:
        pytest.skip(f"no cuobjdump on PATH nor in {nvcc.parent}: nobody looked for the illegal asynchronous copy")
    assert subprocess.run([find_disassembler(nvcc), "--version"], capture_output=True, timeout=60).returncode == 0
