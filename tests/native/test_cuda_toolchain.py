"""Finding nvcc, the driver and its GPUs, or saying what is missing. Compilers and drivers are made up."""

from __future__ import annotations

import ctypes
import subprocess

import pytest
import torch

from kdtree_nb.errors import KernelBuildError, KernelUnavailableError
from kdtree_nb.native import build, cuda_toolchain, toolchain
from kdtree_nb.native.cuda_toolchain import CudaToolchain, Driver, find_cuda_toolchain
from kdtree_nb.native.ops.namespace import _refusal


@pytest.fixture
def nvcc(tmp_path, monkeypatch):
    """nvcc(release, archs): CUDA_HOME holds an nvcc of that release that knows these architectures."""
    path = tmp_path / "cuda" / "bin" / "nvcc"
    path.parent.mkdir(parents=True)
    (tmp_path / "cuda" / "include").mkdir()
    (tmp_path / "cuda" / "include" / "cuda_runtime_api.h").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))

    def make(release: str, archs: str = "sm_80 sm_90 sm_120") -> None:
        path.write_text(
            f'#!/bin/sh\n[ "$1" = --version ] || exec echo {archs}\necho "release {release}, V{release}.1"\necho x\n'
        )
        path.chmod(0o755)

    make("13.0")
    make.path = path
    return make


@pytest.fixture
def machine(monkeypatch):
    """machine(driver, cuda): the driver that is found, and the CUDA that torch is built for."""

    def make(driver: Driver | None, cuda: str | None = "13.0") -> None:
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(cuda_toolchain, "find_driver", lambda: driver)

    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    make(Driver((13, 0), (90,)))
    return make


def test_this_machine_has_all_or_says_why_not():
    found = toolchain.find_toolchain().cuda
    assert isinstance(found, CudaToolchain) == torch.cuda.is_available() or "CUDA kernels: " in str(found)


def test_all_is_there(nvcc, machine):
    found = find_cuda_toolchain()
    assert found.nvcc == nvcc.path and found.home == nvcc.path.parents[1] and found.archs == (90,)
    assert "release 13.0" in found.nvcc_version
    assert "-gencode=arch=compute_90a,code=sm_90a" in found.flags and "-fmad=false" in found.flags


def test_gpus_decide_the_architectures(nvcc, machine, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5 9.0;12.0+PTX")
    machine(Driver((13, 0), (80, 120)))  # the kernels know one of the two
    assert find_cuda_toolchain().archs == (120,)
    for driver in (None, Driver((13, 0), ())):
        machine(driver)
        assert find_cuda_toolchain().archs == (90, 120)


@pytest.mark.parametrize(
    ("driver", "cuda", "message"),
    [
        (Driver((13, 0), (90,)), None, "torch .* is a CPU build. Install"),
        (None, "13.0", r"no NVIDIA driver \(libcuda.so.1\) was found. .*nvidia-smi"),
        (Driver((13, 0), ()), "13.0", "the driver shows no GPU. .*CUDA_VISIBLE_DEVICES"),
        (Driver((13, 0), (75, 86)), "13.0", r"expected sm_90 \(Hopper\) or newer .*got sm_75, sm_86. .*device='cpu'"),
        (
            Driver((12, 8), (90,)),
            "13.0",
            "the driver runs CUDA up to 12.8, .* is of CUDA 13.0. Update the NVIDIA driver",
        ),
    ],
)
def test_a_machine_that_cannot_run_them(driver, cuda, message, nvcc, machine):
    machine(driver, cuda)
    with pytest.raises(KernelUnavailableError, match=message):
        find_cuda_toolchain()


FAKE_DRIVER = """
extern "C" {
int cuDriverGetVersion(int* v) { *v = VERSION; return 0; }
int cuInit(unsigned) { return INIT; }
int cuDeviceGetCount(int* n) { *n = 2; return 0; }
int cuDeviceGetAttribute(int* v, int attribute, int i) { *v = attribute == 75 ? (i ? 12 : 9) : 0; return 0; }
int cuGetErrorString(int error, const char** text) { *text = error == 803 ? "unsupported driver" : 0; return 0; }
}
"""


@pytest.fixture
def libcuda(tmp_path, monkeypatch):
    """libcuda(version, init): a driver of that version, whose cuInit returns `init`."""

    def make(version: int, init: int) -> None:
        (tmp_path / "fake.cpp").write_text(FAKE_DRIVER)
        library = tmp_path / f"libcuda{version}_{init}.so"
        options = [f"-DVERSION={version}", f"-DINIT={init}", "-shared", "-fPIC", "-o", str(library)]
        subprocess.run(["g++", str(tmp_path / "fake.cpp"), *options], check=True)
        open_library = ctypes.CDLL
        monkeypatch.setattr(cuda_toolchain.ctypes, "CDLL", lambda name: open_library(str(library)))

    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return make


def test_the_driver_is_asked(libcuda):
    libcuda(13010, 0)
    assert cuda_toolchain.find_driver() == Driver((13, 1), (90, 120))


@pytest.mark.parametrize(("init", "text"), [(803, "CUDA error 803: unsupported driver"), (999, "CUDA error 999")])
def test_a_driver_that_does_not_start_says_why(init, text, libcuda, nvcc):
    libcuda(13000, init)
    assert cuda_toolchain.find_driver() == Driver((13, 0), (), text)
    with pytest.raises(KernelUnavailableError, match=rf"the driver shows no GPU \({text}\). Check `nvidia-smi`"):
        find_cuda_toolchain()


def test_a_driver_older_than_the_toolkit(libcuda, nvcc):
    libcuda(12080, 0)
    with pytest.raises(KernelUnavailableError, match="the driver runs CUDA up to 12.8, .* is of CUDA 13.0. Update"):
        find_cuda_toolchain()


def test_no_nvcc(nvcc, machine):
    nvcc.path.unlink()
    with pytest.raises(
        KernelBuildError, match=f"no `nvcc` in {nvcc.path.parent}. Install the CUDA toolkit 13.0 .*CUDA_HOME"
    ):
        find_cuda_toolchain()


def test_nvcc_of_another_cuda_than_torch(nvcc, machine):
    nvcc("12.9")
    with pytest.raises(KernelBuildError, match="torch is built for CUDA 13.0, but .*nvcc is of CUDA 12.9. Install"):
        find_cuda_toolchain()
    machine(Driver((13, 0), (90,)), "12.8")
    assert "12.9" in find_cuda_toolchain().nvcc_version  # within a major version they go together


def test_nvcc_that_does_not_know_the_gpu(nvcc, machine):
    machine(Driver((13, 0), (90, 130)))
    with pytest.raises(
        KernelBuildError, match="cannot compile for sm_130; the newest it knows is sm_120. Install a newer"
    ):
        find_cuda_toolchain()


def test_nvcc_that_does_not_run(nvcc, machine):
    nvcc.path.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(KernelBuildError, match="--version` failed"):
        find_cuda_toolchain()
    nvcc.path.write_text("#!/bin/sh\necho hello\n")
    with pytest.raises(KernelBuildError, match="names no release: 'hello'"):
        find_cuda_toolchain()


def test_the_cpu_kernels_are_built_all_the_same(nvcc, machine, tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "answer.cpp").write_text('extern "C" int answer() { return 42; }\n')
    machine(Driver((12, 8), (90,)))
    made = build.build_library(tmp_path / "kernels", tmp_path / "cache", print)
    assert made.path.is_file() and "Update the NVIDIA driver" in made.no_cuda


def test_the_name_of_a_library_tells_nvcc_and_architectures(nvcc, machine, tmp_path):
    (tmp_path / "kernels").mkdir()
    names = set()
    for archs, release in (((90,), "13.0"), ((90, 120), "13.0"), ((90,), "13.1")):
        nvcc(release)
        machine(Driver((13, 1), archs))
        names.add(build.namespace_of(tmp_path / "kernels", toolchain.find_toolchain()))
    machine(None)
    names.add(build.namespace_of(tmp_path / "kernels", toolchain.find_toolchain()))
    assert len(names) == 4


def test_a_device_without_kernels_is_an_error(monkeypatch):
    monkeypatch.setattr(build, "load", lambda: build.Build("kdtree_x", None, 0.0, "The reason. The remedy."))
    build.require(torch.device("cpu"))
    with pytest.raises(KernelUnavailableError, match="none for device 'cuda:1'. The reason. The remedy."):
        build.require(torch.device("cuda:1"))
    with pytest.raises(KernelUnavailableError, match="none for device 'meta'. expected"):
        build.require(torch.device("meta"))
    with pytest.raises(KernelUnavailableError, match="embed: no kernel for tensors on a GPU. The reason."):
        _refusal("embed", "The reason.")(1, 2)


@pytest.fixture
def gpus(monkeypatch):
    """gpus((9, 0), …): the GPUs that torch sees, and a library of kernels for them."""

    def make(*capabilities: tuple[int, int]) -> None:
        monkeypatch.setattr(build, "load", lambda: build.Build("kdtree_x", None, 0.0, ""))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")

    return make


def test_one_gpu_of_several_may_be_too_old(gpus):
    gpus((8, 0), (12, 0))
    build.require(torch.device("cuda:1"))
    for name in ("cuda", "cuda:0"):
        with pytest.raises(
            KernelUnavailableError, match=f"none for device '{name}'. expected sm_90 .*, got GPU 0, which is sm_80"
        ):
            build.require(torch.device(name))


def test_a_gpu_that_is_not_there(gpus):
    for capabilities, name in (((), "cuda"), (((9, 0),), "cuda:1")):
        gpus(*capabilities)
        with pytest.raises(KernelUnavailableError, match=f"below cuda:{len(capabilities)}, .*CUDA_VISIBLE_DEVICES"):
            build.require(torch.device(name))
