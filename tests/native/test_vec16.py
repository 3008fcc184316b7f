"""Every form of the vector type (AVX-512, AVX2, plain) gives the same bits, alone and inside linear and verify_attn."""

from __future__ import annotations

import platform
import shlex
import subprocess
from pathlib import Path

import pytest

from kdtree_nb.native.build import FLAGS, kernels_dir
from kdtree_nb.native.toolchain import find_compiler

X86_FORMS = {"native": [], "avx2": ["-mno-avx512f"], "plain": ["-mno-avx512f", "-mno-avx2", "-mno-fma"]}
FORMS = X86_FORMS if platform.machine() in ("x86_64", "AMD64") else {"native": []}


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> dict[str, str]:
    """What vec16_check.cpp prints, per form."""
    folder, kernels = tmp_path_factory.mktemp("vec16"), kernels_dir()
    source = Path(__file__).with_name("vec16_check.cpp")
    outputs = {}
    for form, disabled in FORMS.items():
        program = folder / form
        sources = [source, *(kernels / f"{stem}.cpp" for stem in ("linear", "pack_int4", "verify_attn"))]
        command = [*shlex.split(find_compiler()), *FLAGS, "-O1", "-std=c++17", *disabled, f"-I{kernels}", *sources,
                   "-o", program]  # fmt: skip
        subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True)
        outputs[form] = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    return outputs


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_give_the_same_bits(form, printed):
    assert printed["native"].count("\n") > 1000
    assert printed[form].splitlines() == printed["native"].splitlines()


@pytest.mark.parametrize("form", FORMS)
def test_16_sums_at_once_equal_single_sums(form, printed):
    assert "differs" not in printed[form]
