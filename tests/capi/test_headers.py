"""The headers for other programs are valid C99 and C++17, with every warning an error."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "kernels"
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-pedantic", "-fsyntax-only")
LANGUAGES = [("cc", "c", "c99"), ("cc", "c", "c11"), ("c++", "c++", "c++17"), ("c++", "c++", "c++20")]


@pytest.mark.parametrize(("compiler", "language", "standard"), LANGUAGES)
@pytest.mark.parametrize("header", ["op_args.h"])
def test_header_compiles_alone_without_a_warning(header, compiler, language, standard, tmp_path):
    assert shutil.which(compiler), f"{compiler} was not found on PATH"
    source = tmp_path / f"use.{language.replace('+', 'p')}"
    source.write_text(f'#include "{header}"\n#include "{header}"\nint main(void) {{ return 0; }}\n')
    command = [compiler, "-x", language, f"-std={standard}", *WARNINGS, f"-I{KERNELS}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
