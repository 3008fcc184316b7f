"""Finding the compiler, ninja and the CPU, or saying what is missing."""

from __future__ import annotations

import sys

import pytest

from kdtree_nb.errors import KernelBuildError
from kdtree_nb.native import toolchain


def test_this_machine():
    tools = toolchain.find_toolchain()
    assert (tools.ninja_dir / "ninja").is_file() and tools.compiler_version.strip() and len(tools.cpu) == 64


def test_cpu_features_decide_the_digest(monkeypatch):
    features = toolchain.cpu_features()
    assert features and toolchain.cpu_digest() == toolchain.cpu_digest()
    digest = toolchain.cpu_digest()
    key = next(iter(features))
    monkeypatch.setattr(toolchain, "cpu_features", lambda: features | {key: features[key] + " other"})
    assert toolchain.cpu_digest() != digest


def test_cxx_chooses_the_compiler(monkeypatch):
    default = toolchain.find_compiler()
    monkeypatch.setenv("CXX", f"{default} -pipe")
    assert toolchain.find_compiler() == f"{default} -pipe"


def test_cxx_names_a_missing_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    with pytest.raises(KernelBuildError, match="CXX='no-such-compiler -m64' was not found"):
        toolchain.find_toolchain()


def test_cxx_that_is_no_command(monkeypatch):
    monkeypatch.setenv("CXX", "g++ '")
    with pytest.raises(KernelBuildError, match="is no command: No closing quotation"):
        toolchain.find_toolchain()


def test_compiler_that_does_not_run(tmp_path, monkeypatch):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(KernelBuildError, match="--version` failed"):
        toolchain.find_toolchain()


def test_ninja_of_a_venv_that_is_not_activated(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "bin" / "python"))
    ninja = tmp_path / "venv" / "bin" / "ninja"
    ninja.parent.mkdir(parents=True)
    ninja.write_text("#!/bin/sh\n")
    ninja.chmod(0o755)
    assert toolchain.find_ninja() == ninja


def test_no_ninja(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(toolchain.sysconfig, "get_path", lambda name: str(tmp_path / "scripts"))
    with pytest.raises(KernelBuildError, match=r"no `ninja` in .*scripts.*python -m pip install ninja"):
        toolchain.find_ninja()
