"""What `kdtree-nb doctor` finds, on this machine and on broken ones."""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace

import pytest
import torch

from kdtree_nb.native import build, doctor, toolchain


def findings() -> dict[str, doctor.Finding]:
    found = doctor.diagnose()
    assert len({finding.name for finding in found}) == len(found)
    return {finding.name: finding for finding in found}


def test_this_machine():
    found = findings()
    needed = ("python", "torch", "compiler", "ninja", "sources", "cache", "cpu", "threads")
    assert {name: found[name].status for name in needed} == dict.fromkeys(needed, "ok")
    assert sys.executable in found["python"].detail and torch.__version__ in found["torch"].detail
    assert toolchain.find_compiler() in found["compiler"].detail
    assert str(torch.get_num_threads()) in found["threads"].detail


def test_is_ready_for_json():
    records = [finding.to_dict() for finding in doctor.diagnose()]
    assert json.loads(json.dumps(records)) == records
    assert all(set(record) == {"name", "status", "detail", "remedy"} for record in records)


def test_every_problem_has_a_remedy(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(toolchain.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(build, "__file__", str(tmp_path / "kdtree_nb" / "native" / "build.py"))
    (tmp_path / "cache").write_text("a file where the folder should be")
    monkeypatch.setenv("KDTREE_CACHE_DIR", str(tmp_path / "cache"))
    found = findings()
    broken = {name for name, finding in found.items() if finding.status == "problem"}
    assert broken == {"compiler", "ninja", "sources", "cache"}
    assert all(found[name].remedy and str(tmp_path) in found[name].detail for name in broken)
    assert "KDTREE_CACHE_DIR" in found["cache"].remedy and "pip install ninja" in found["ninja"].remedy
    assert "install" in found["compiler"].remedy.lower()
    assert found["nvcc"].status == "absent"


def test_cache_tells_whether_the_kernels_are_ready(monkeypatch, tmp_path):
    monkeypatch.setenv("KDTREE_CACHE_DIR", str(tmp_path))
    name = build.namespace_of(build.kernels_dir(), toolchain.find_toolchain())
    assert "0 builds" in findings()["cache"].detail and "will be compiled" in findings()["cache"].detail
    (tmp_path / name / "build-x").mkdir(parents=True)
    assert "1 running or unfinished" in findings()["cache"].detail
    (tmp_path / name / f"{name}.so").touch()
    assert f"{name} is ready" in findings()["cache"].detail
    (tmp_path / name / "build.json").write_text('{"compile_s": 12.5}')
    assert "12.5 s" in findings()["cache"].detail


def test_nvcc_that_does_not_run(monkeypatch, tmp_path):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\nexit 1\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert findings()["nvcc"].status == "problem"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.9, V12.9.86'\n")
    assert "release 12.9" in findings()["nvcc"].detail


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_gpu_is_said_honestly():
    cuda = findings()["cuda"]
    assert cuda.status == "absent" and "no GPU" in cuda.detail and os.fspath(cuda.remedy)


def test_a_gpu_without_kernels_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: ((8, 0), (9, 0))[index])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "an old GPU")
    properties = [SimpleNamespace(name="a GPU", major=major, minor=0, total_memory=2**36) for major in (8, 9)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties[index])
    found = findings()
    assert found["cuda:1"].status == "ok" and "sm_90, 64 GiB" in found["cuda:1"].detail
    assert found["cuda:0"].status == "absent" and "got an old GPU, which is sm_80" in found["cuda:0"].remedy
