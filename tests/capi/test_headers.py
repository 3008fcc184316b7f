"""The headers for other programs are valid C99 and C++17, with every warning an error, and leave nothing of the kernels
out: every operation, size and value of op_args.h is there for C and for ctypes."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from kdtree_nb.native import capi
from kdtree_nb.native.capi_signatures import SIGNATURES, value_of
from kdtree_nb.native.capi_structs import read_ops

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "kernels"
OP_ARGS = (KERNELS / "op_args.h").read_text()
HEADER = (KERNELS / "capi" / "kdtree.h").read_text()
OPS = sorted(set(re.findall(r"^int (\w+)_(?:cpu|cuda)\(", OP_ARGS, re.MULTILINE)))
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-pedantic")
IN_C = [("cc", "c", "c99"), ("cc", "c", "c11")]
IN_CPP = [("c++", "c++", "c++17"), ("c++", "c++", "c++20")]
CASES = [
    *((header, *language) for header in ("op_args.h", "capi/kdtree.h") for language in IN_C + IN_CPP),
    *(("capi/kdtr.h", *language) for language in IN_CPP),
]


@pytest.mark.parametrize(("header", "compiler", "language", "standard"), CASES)
def test_header_compiles_alone_without_a_warning(header, compiler, language, standard, tmp_path):
    assert shutil.which(compiler), f"{compiler} was not found on PATH"
    source = tmp_path / "use"
    source.write_text(f'#include "{header}"\n#include "{header}"\nint main(void) {{ return 0; }}\n')
    command = [compiler, "-x", language, f"-std={standard}", *WARNINGS, "-fsyntax-only", f"-I{KERNELS}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_there_are_operations():
    assert len(OPS) >= 18 and {"linear", "verify_attn", "tree_build", "step_commit"} <= set(OPS)
    assert sorted(read_ops(OP_ARGS)) == OPS == sorted(SIGNATURES)


@pytest.mark.parametrize("op", OPS)
def test_c_has_the_operation(op):
    assert re.search(rf"^typedef KDTREE_STRUCT\(\w+\) kdtree_{op}_args;$", HEADER, re.MULTILINE)
    assert f"kdtree_status kdtree_{op}(const kdtree_{op}_args* args, const kdtree_device* device);" in HEADER
    assert callable(getattr(capi.load(), op)) and getattr(capi.load().raw, f"kdtree_{op}")


@pytest.mark.parametrize("count", re.findall(r"^int64_t (\w+)_cuda_workspace_bytes\(", OP_ARGS, re.MULTILINE))
def test_c_has_the_size_of_the_workspace(count):
    assert f"kdtree_{count}_workspace_bytes(" in HEADER and getattr(capi.load().raw, f"kdtree_{count}_workspace_bytes")


OF_A_SHARE = {"num_segments", "whole_width", "whole_shared_width"}
"""Sizes that only one of several ranks gives; 0 by default."""


@pytest.mark.parametrize("op", OPS)
def test_numpy_shapes_are_known_for_every_field(op):
    """Each pointer is an input, a result or memory that calls provide; each size is an expression of known symbols."""
    known, signature = capi.load().ops[op], SIGNATURES[op]
    optional = {"num_rows_device", "row_begin", "words", "workspace"} - {array.name for array in signature.inputs}
    assert {array.name for array in (*signature.inputs, *signature.outputs)} == set(known.pointers) - optional
    assert all(known.pointers[array.name].is_output for array in signature.outputs)
    assert all(known.pointers[array.name].is_output == array.is_in_place for array in signature.inputs)
    assert set(signature.sizes) <= set(known.numbers)
    left = {name for name in known.numbers if re.search(r"num_(?!threads)|dim|stride|width|budget|depth", name)}
    assert left - OF_A_SHARE <= set(signature.sizes)
    symbols = {symbol: 2 for symbol in signature.sizes.values() if symbol.isalpha()}
    for array in (*signature.inputs, *signature.outputs):
        symbols |= {dim: 2 for dim in array.dims if dim.isalpha()}
    assert all(value_of(dim, symbols) > 0 for array in signature.outputs for dim in array.dims)


def c_layout(tmp_path, compiler, language, standard):
    """{struct: {"": sizeof, field: offsetof}} as a compiler sees kdtree.h."""
    lines = ['#include "kdtree.h"', "#include <stddef.h>", "#include <stdio.h>", "int main(void) {"]
    for op, known in read_ops(OP_ARGS).items():
        lines.append(f'  printf("{op} . %d\\n", (int)sizeof(kdtree_{op}_args));')
        for field, _ in known.struct._fields_:
            lines.append(f'  printf("{op} {field} %d\\n", (int)offsetof(kdtree_{op}_args, {field}));')
    source, program = tmp_path / "layout", tmp_path / "program"
    source.write_text("\n".join([*lines, "  return 0;", "}", ""]))
    command = [compiler, "-x", language, f"-std={standard}", *WARNINGS, f"-I{KERNELS / 'capi'}", str(source)]
    done = subprocess.run([*command, "-o", str(program)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    layout: dict[str, dict[str, int]] = {}
    for line in subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines():
        op, field, number = line.split()
        layout.setdefault(op, {})[field] = int(number)
    return layout


@pytest.mark.parametrize(("compiler", "language", "standard"), [IN_C[0], IN_CPP[0]])
def test_c_cpp_and_ctypes_lay_structs_out_alike(compiler, language, standard, tmp_path):
    layout = c_layout(tmp_path, compiler, language, standard)
    library = capi.load()
    assert sorted(layout) == OPS
    for op, known in library.ops.items():
        expected = {field: getattr(known.struct, field).offset for field, _ in known.struct._fields_}
        assert layout[op] == {".": ctypes.sizeof(known.struct), **expected}
        assert library.raw.kdtree_args_bytes(op.encode()) == layout[op]["."]
    assert library.raw.kdtree_args_bytes(b"nothing") == -1 and library.raw.kdtree_args_bytes(None) == -1


def test_structs_of_another_form_are_refused():
    for field in ("char x;", "float** x;", "int64_t x[2];", "std::vector<int> x;"):
        with pytest.raises(Exception, match="expected a field of a known type"):
            read_ops(f"struct XArgs {{\n  {field}\n}};\nint x_cpu(const XArgs&);\n")


def values(text, pattern):
    return {name: int(number) for name, number in re.findall(pattern, text)}


def test_c_has_every_value_of_the_kernels_enumerations():
    kernels = values("".join(re.findall(r"^enum \w+ : int32_t \{(.*?)\}", OP_ARGS, re.M | re.S)), r"\bk(\w+) = (\d+)")
    in_c = values(HEADER, r"\bKDTREE_(\w+) = (\d+)")
    snake = {re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).upper(): number for name, number in kernels.items()}
    assert len(snake) >= 16 and snake.items() <= in_c.items()


def test_every_status_has_its_name():
    library = capi.load()
    statuses = re.search(r"enum \{\s*KDTREE_OK.*?\};", HEADER, re.S)[0]
    for name, number in values(statuses, r"\b(KDTREE_\w+) = (\d+)").items():
        assert library.raw.kdtree_status_string(number).decode() == name
    assert library.raw.kdtree_status_string(77) == b"an unknown status"


def test_versions_are_those_of_package_and_header():
    library = capi.load()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert library.version == version == re.search(r'KDTREE_VERSION "(.*)"', HEADER)[1]
    assert library.raw.kdtree_abi_version() == capi.ABI_VERSION
    assert capi.ABI_VERSION == int(re.search(r"KDTREE_ABI_VERSION (\d+)", HEADER)[1])


def test_the_library_exports_what_the_header_declares_and_nothing_else():
    names = subprocess.run(["nm", "-D", "--defined-only", str(capi.load().build.path)], capture_output=True, text=True)
    exported = {line.split()[-1] for line in names.stdout.splitlines() if " T " in line}
    declared = set(re.findall(r"^KDTREE_API [^(]*?(kdtree_\w+)\(", HEADER, re.MULTILINE))
    assert exported == declared and len(declared) > len(OPS)
