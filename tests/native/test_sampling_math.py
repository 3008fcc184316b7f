"""The arithmetic of sampling.h: Gumbel noise of a word, its bound, and the mass of a token, the same on every CPU."""

from __future__ import annotations

import platform
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest

from kdtree_nb.native.build import FLAGS, kernels_dir
from kdtree_nb.native.toolchain import find_compiler


def run(folder: Path, *flags: str) -> str:
    """What sampling_check.cpp prints when it is compiled with these flags."""
    source, program = Path(__file__).with_name("sampling_check.cpp"), folder / f"check{len(flags)}"
    command = [*shlex.split(find_compiler()), *FLAGS, *flags, "-std=c++17", f"-I{kernels_dir()}", source, "-o", program]
    subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True)
    return subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("sampling")


@pytest.fixture(scope="module")
def printed(folder) -> str:
    return run(folder)


def floats(bits: list[str]) -> np.ndarray:
    return np.array([int(b, 16) for b in bits], np.uint32).view(np.float32).astype(np.float64)


@pytest.fixture(scope="module")
def noise(printed) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Words as whole numbers in float64, their noise, its bound."""
    lines = [line.split()[1:] for line in printed.splitlines() if line.startswith("noise")]
    words, values, bounds = zip(*lines, strict=True)
    assert len(lines) > 50_000
    return np.array([int(w, 16) for w in words], np.float64), floats(values), floats(bounds)


def test_noise_is_minus_log_of_minus_log(noise):
    words, values, _ = noise
    one_minus_u = (2.0**32 - 0.5 - words) / 2**32
    exponential = np.where(words < 2**31, -np.log((words + 0.5) / 2**32), -np.log1p(-one_minus_u))
    want = -np.log(exponential)
    assert np.all(np.abs(values - want) <= 2e-7 + 4e-7 * np.abs(want))
    assert values.min() > -3.14 and values.max() < 22.88


def test_noise_rises_with_the_word_and_stays_below_its_bound(noise):
    words, values, bounds = noise
    order = np.argsort(words)
    assert np.all(np.diff(values[order]) >= -1e-6)
    assert np.all(values <= bounds) and bounds.max() < 23.0


def test_mass_is_the_exponential_in_units_of_2_to_minus_40(printed):
    lines = [line.split()[1:] for line in printed.splitlines() if line.startswith("mass")]
    scaled, mass = floats([s for s, _ in lines]), np.array([int(m, 16) for _, m in lines], np.float64)
    assert len(lines) == 30_000 and mass[0] == 2.0**40 and mass[-1] == 0
    want = np.exp(scaled) * 2.0**40
    assert np.all(np.abs(mass - want) <= 1 + 2e-7 * want)


IS_X86 = platform.machine() in ("x86_64", "AMD64")
FORMS = [["-O0"], *([["-mno-avx512f", "-O1"], ["-mno-avx512f", "-mno-avx2", "-mno-fma"]] if IS_X86 else [])]


@pytest.mark.parametrize("flags", FORMS)
def test_every_instruction_set_gives_the_same_bits(flags, printed, folder):
    assert run(folder, *flags).splitlines() == printed.splitlines()
