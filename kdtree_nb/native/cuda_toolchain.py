"""What CUDA kernels need from the machine: a torch for CUDA, a GPU they run on, nvcc. Found, or named with a remedy."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import re
import shutil
import subprocess
from pathlib import Path

from kdtree_nb.errors import KernelBuildError, KernelUnavailableError

MIN_ARCH = 90
"""The oldest architecture that the kernels know, Hopper. sm_100 and sm_120 are Blackwell."""

FLAGS = ("-std=c++17", "-O3", "-fmad=false")
"""nvcc's flags beside the architectures. No contraction: a fused multiply-add happens only where it is written."""

_DEFAULT_HOME = Path("/usr/local/cuda")


@dataclasses.dataclass(frozen=True)
class Driver:
    """The NVIDIA driver: the newest CUDA it runs, (13, 0), the architectures of the visible GPUs, (90,), and why it
    shows none, in its own words."""

    version: tuple[int, int]
    archs: tuple[int, ...]
    problem: str = ""


@dataclasses.dataclass(frozen=True)
class CudaToolchain:
    """nvcc, the text of its version, and the architectures to compile for, ascending."""

    nvcc: Path
    nvcc_version: str
    archs: tuple[int, ...]

    @property
    def home(self) -> Path:
        """The toolkit's folder."""
        return self.nvcc.parents[1]

    @property
    def flags(self) -> list[str]:
        """nvcc's flags: machine code for each architecture and no PTX, so that a load compiles nothing."""
        targets = [target(arch) for arch in self.archs]
        return [*FLAGS, *(f"-gencode=arch=compute_{name},code=sm_{name}" for name in targets)]


def target(arch: int) -> str:
    """What nvcc compiles for: an architecture, with an `a` where the kernels use instructions of it alone."""
    return f"{arch}a" if arch == 90 else str(arch)


def find_cuda_toolchain(for_torch: bool = True) -> CudaToolchain:
    """Find all that CUDA kernels need, beside torch or without it. Raises KernelUnavailableError where they cannot run
    on this machine, and KernelBuildError where they cannot be compiled; both name what was looked for, where, and the
    remedy."""
    release = _release_of_torch() if for_torch else ""
    driver = find_driver()
    archs = _archs(driver)
    nvcc = find_nvcc(release)
    version, text = nvcc_version(nvcc)
    if for_torch:
        _check_torch(release, version, nvcc)
    _check_driver(version, nvcc, driver)
    _check_archs(nvcc, archs)
    return CudaToolchain(nvcc, text, archs)


def _release_of_torch() -> str:
    """The CUDA that torch is built for, "13.0"."""
    import torch  # here: the C ABI is built without it

    if torch.version.cuda:
        return torch.version.cuda
    raise KernelUnavailableError(
        f"CUDA kernels: torch {torch.__version__} is a CPU build. Install one for CUDA: see https://pytorch.org"
    )


def find_driver() -> Driver | None:
    """The NVIDIA driver and its GPUs, asked without making a CUDA context; None where there is no driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version, count = ctypes.c_int(0), ctypes.c_int(0)
    library.cuDriverGetVersion(ctypes.byref(version))
    status = library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count))
    archs = {10 * _attribute(library, 75, i) + _attribute(library, 76, i) for i in range(count.value)}
    numbers = version.value // 1000, version.value % 1000 // 10
    return Driver(numbers, tuple(sorted(archs)), _error_text(library, status) if status else "")


def _error_text(library: ctypes.CDLL, status: int) -> str:
    """The driver's words for an error: `CUDA error 803: system has unsupported display driver / …`."""
    text = ctypes.c_char_p()
    library.cuGetErrorString(status, ctypes.byref(text))
    return f"CUDA error {status}" + (f": {text.value.decode()}" if text.value else "")


def _attribute(library: ctypes.CDLL, attribute: int, index: int) -> int:
    """75 and 76 are a device's compute capability, major and minor."""
    value = ctypes.c_int(0)
    library.cuDeviceGetAttribute(ctypes.byref(value), attribute, index)
    return value.value


def _archs(driver: Driver | None) -> tuple[int, ...]:
    """Architectures of the visible GPUs that the kernels know; without a GPU those of TORCH_CUDA_ARCH_LIST."""
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    if driver and driver.archs:
        archs, source = driver.archs, "the visible GPUs"
    elif listed:
        numbers = re.findall(r"(\d+)\.(\d)", listed)
        archs, source = tuple(int(major + minor) for major, minor in numbers), f"TORCH_CUDA_ARCH_LIST={listed!r}"
    else:
        reason = "no NVIDIA driver (libcuda.so.1) was found" if driver is None else "the driver shows no GPU"
        if driver and driver.problem:
            reason += f" ({driver.problem})"
        raise KernelUnavailableError(
            f"CUDA kernels: {reason}. Check `nvidia-smi` and CUDA_VISIBLE_DEVICES; to compile for another machine set "
            "TORCH_CUDA_ARCH_LIST, such as 9.0"
        )
    known = tuple(sorted({arch for arch in archs if arch >= MIN_ARCH}))
    if not known:
        found = ", ".join(f"sm_{arch}" for arch in archs) or "none"
        raise KernelUnavailableError(
            f"CUDA kernels: expected sm_{MIN_ARCH} (Hopper) or newer in {source}, got {found}. Use device='cpu'."
        )
    return known


def find_nvcc(release: str = "") -> Path:
    """The compiler of $CUDA_HOME or $CUDA_PATH, else on PATH, else of /usr/local/cuda. Raises KernelBuildError where
    there is none; `release` is the one that it then says to install."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    folders = [str(Path(home) / "bin")] if home else [os.environ.get("PATH", ""), str(_DEFAULT_HOME / "bin")]
    found = shutil.which("nvcc", path=os.pathsep.join(folders))
    if found is None:
        raise KernelBuildError(
            f"CUDA kernels: no `nvcc` in {' or '.join(folders)}. Install the CUDA toolkit{release and ' '}{release} "
            "(conda: `conda install -c nvidia cuda-toolkit`) or set CUDA_HOME to its folder."
        )
    path, default = Path(found).resolve(), _DEFAULT_HOME / "bin" / "nvcc"
    header = Path("include", "cuda_runtime_api.h")
    places = (path.parents[1], *path.parents[1].glob("targets/*"))
    is_wrapper = not any((place / header).is_file() for place in places)
    return default.resolve() if is_wrapper and default.is_file() else path


def nvcc_version(nvcc: Path) -> tuple[tuple[int, int], str]:
    """((13, 0), the last lines of `nvcc --version`). Raises KernelBuildError where it names no release."""
    text = _run(nvcc, "--version")
    release = re.search(r"release (\d+)\.(\d+)", text)
    if release is None:
        raise KernelBuildError(f"CUDA kernels: `{nvcc} --version` names no release: {text!r}. Reinstall the toolkit.")
    return (int(release[1]), int(release[2])), " ".join(text.splitlines()[-2:])


def _run(nvcc: Path, option: str) -> str:
    try:
        done = subprocess.run([str(nvcc), option], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelBuildError(
            f"CUDA kernels: `{nvcc} {option}` failed: {error}. Reinstall the CUDA toolkit or set CUDA_HOME."
        ) from error
    return done.stdout.strip()


def _check_torch(release: str, version: tuple[int, int], nvcc: Path) -> None:
    """torch and nvcc must share the major version."""
    if version[0] != int(release.partition(".")[0]):
        raise KernelBuildError(
            f"CUDA kernels: torch is built for CUDA {release}, but {nvcc} is of CUDA {version[0]}.{version[1]}. "
            f"Install the CUDA toolkit {release} and set CUDA_HOME to it, or a torch for CUDA {version[0]}."
        )


def _check_driver(version: tuple[int, int], nvcc: Path, driver: Driver | None) -> None:
    """The driver's major version must not be below that of nvcc."""
    if driver and driver.version[0] < version[0]:
        raise KernelUnavailableError(
            f"CUDA kernels: the driver runs CUDA up to {driver.version[0]}.{driver.version[1]}, but {nvcc} is of CUDA "
            f"{version[0]}.{version[1]}. Update the NVIDIA driver, or install torch and a toolkit for CUDA "
            f"{driver.version[0]}."
        )


def _check_archs(nvcc: Path, archs: tuple[int, ...]) -> None:
    known = {int(number) for number in re.findall(r"sm_(\d+)\b", _run(nvcc, "--list-gpu-code"))}
    missing = [f"sm_{arch}" for arch in archs if arch not in known]
    if missing:
        raise KernelBuildError(
            f"CUDA kernels: {nvcc} cannot compile for {', '.join(missing)}; the newest it knows is sm_{max(known)}. "
            "Install a newer CUDA toolkit (and a torch that goes with it)."
        )
