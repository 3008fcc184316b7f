"""Builds and loads the CUDA linear and moe_experts for run_linear.py and run_int4.py: ctypes, pointers of tensors."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from op_lib import DTYPES, fill

DEVICE = "cuda"
ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    "kernels/linear_int4.cu", "kernels/linear.cu", "kernels/moe_experts.cu", "kernels/pack_int4.cu",
    "kernels/swiglu.cu", "kernels/rms_norm.cu", "tests/cuda/shim_linear.cu",
)  # fmt: skip


def build() -> ctypes.CDLL:
    """Returns the library named by KDTREE_LINEAR_SO if it loads here, else one compiled now."""
    prebuilt = os.environ.get("KDTREE_LINEAR_SO", "")
    if prebuilt:
        try:
            return ctypes.CDLL(prebuilt)
        except OSError as error:
            print("building here:", error, flush=True)
    folder = Path(tempfile.mkdtemp())
    major, minor = torch.cuda.get_device_capability()
    arch = f"{major}{minor}{'a' if major == 9 else ''}"
    flags = ["-O3", "-std=c++17", "-fmad=false", f"-gencode=arch=compute_{arch},code=sm_{arch}", "-Xcompiler", "-fPIC"]
    flags += ["-I", str(ROOT / "kernels")]
    objects = [str(folder / (Path(s).stem + ".o")) for s in SOURCES]
    jobs = [
        subprocess.Popen(["nvcc", *flags, "-c", str(ROOT / s), "-o", o]) for s, o in zip(SOURCES, objects, strict=True)
    ]
    if any([job.wait() for job in jobs]):
        raise RuntimeError("nvcc failed")
    so = folder / "libkdtree_linear.so"
    subprocess.run(["nvcc", *flags, "-shared", "--cudart", "static", "-o", str(so), *objects], check=True)
    return ctypes.CDLL(str(so))


@dataclass(frozen=True)
class Shape:
    """A tile shape: its number, name, rows and outputs of a block, blocks of a cluster."""

    index: int
    name: str
    num_rows: int
    num_out: int
    cluster: int


class Experts(NamedTuple):
    """Packed weights of moe_experts; the shared expert may be missing."""

    gate_up: torch.Tensor
    down: torch.Tensor
    shared_gate_up: torch.Tensor | None
    shared_down: torch.Tensor | None
    width: int
    shared_width: int


class Lib:
    """The library's functions on torch tensors; any status but 0 raises. skip: INT4 shapes that are not to be run."""

    skip: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.c = build()
        self.c.kd_shape.restype = ctypes.c_char_p
        self.c.kd_moe_workspace.restype = ctypes.c_int64
        self.c.kd_int4_shape.restype = ctypes.c_char_p
        for name in ("kd_pack", "kd_pack_int4", "kd_moe"):
            getattr(self.c, name).argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self.c.kd_moe_with.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
        self.c.kd_linear.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
        self.c.kd_rms_norm.argtypes = [ctypes.c_void_p, ctypes.c_void_p]

    @staticmethod
    def _check(status: int, what: str) -> None:
        if status:
            raise RuntimeError(f"{what}: expected status 0, got {status}")

    @staticmethod
    def _stream() -> int:
        return torch.cuda.current_stream().cuda_stream

    def shapes(self, dtype: torch.dtype) -> list[Shape]:
        """All tile shapes of linear for a dtype."""
        out, numbers = [], (ctypes.c_int * 3)()
        for i in range(self.c.kd_num_shapes(DTYPES[dtype])):
            name = self.c.kd_shape(DTYPES[dtype], i, numbers).decode()
            out.append(Shape(i, name.split(", ", 1)[1].replace(", ", "-"), *numbers))
        return out

    def int4_shapes(self, partial: bool = False) -> list[Shape]:
        """The tile shapes of linear for INT4 weights; partial: those of the experts' down projections."""
        out, numbers = [], (ctypes.c_int * 3)()
        for i in range(self.c.kd_num_int4_shapes(partial)):
            name = self.c.kd_int4_shape(partial, i, numbers).decode()
            kind, shape = name.split(", ", 1)
            if partial or i not in self.skip:
                out.append(Shape(i, ("w " if "wgmma" in kind else "") + shape.replace(", ", "-"), *numbers))
        return out

    def pack_int4(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """weight i32 [G, N, K/8], scale bf16 [G, N, K/group] -> u8 [G, ceil(N/64), K/32, 4, 288]."""
        g, n, words = weight.shape
        packed = torch.full((g, -(-n // 64), words // 4, 4, 288), 255, dtype=torch.uint8, device=weight.device)
        fields = {
            "weight": weight, "scale": scale, "packed": packed, "num_groups": g, "num_out": n, "num_in": 8 * words,
            "group_size": 8 * words // scale.shape[2],
        }  # fmt: skip
        self._check(self.c.kd_pack_int4(ctypes.byref(fill("pack_int4", fields)), self._stream()), "pack_int4")
        return packed

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """weight [G, N, K] -> packed [G, ceil(N/16), ceil(K/32), 512]."""
        g, n, k = weight.shape
        packed = torch.full((g, -(-n // 16), -(-k // 32), 512), float("nan"), dtype=weight.dtype, device=weight.device)
        fields = {"weight": weight, "packed": packed, "num_groups": g, "num_out": n, "num_in": k, "dtype": weight.dtype}
        self._check(self.c.kd_pack(ctypes.byref(fill("pack_linear", fields)), self._stream()), "pack_linear")
        return packed

    def linear_args(self, x, packed, out, residual=None, num_rows_device=None, settled=False) -> ctypes.Structure:
        """x [T, G, K] with any row and group stride, out [T, G, N]."""
        t, g, n = out.shape
        fields = {
            "x": x, "packed": packed, "residual": residual, "out": out, "num_rows": t, "num_groups": g, "num_out": n,
            "num_in": x.shape[2], "x_row_stride": x.stride(0), "x_group_stride": x.stride(1), "dtype": x.dtype,
            "out_dtype": out.dtype, "num_rows_device": num_rows_device, "weights_settled": settled,
            "int4": packed.dtype == torch.uint8,
        }  # fmt: skip
        return fill("linear", fields)

    def run(self, args: ctypes.Structure, shape: int = -1) -> None:
        """linear_cuda, or one shape of it."""
        self._check(self.c.kd_linear(ctypes.byref(args), shape, self._stream()), f"linear, shape {shape}")

    @staticmethod
    def norm_args(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> ctypes.Structure:
        """rms_norm of x [T, D] bf16; keeps its tensors alive."""
        fields = {"x": x, "weight": weight, "out": out, "num_rows": x.shape[0], "dim": x.shape[1], "dtype": x.dtype}
        args = fill("rms_norm", fields | {"x_stride": x.stride(0), "eps": 1e-6, "weights_settled": True})
        args.keep = fields
        return args

    def norm(self, args: ctypes.Structure) -> None:
        """rms_norm_cuda."""
        self._check(self.c.kd_rms_norm(ctypes.byref(args), self._stream()), "rms_norm")

    def linear(self, x, packed, out, shape=-1, **more) -> None:
        """`run` of `linear_args`."""
        self.run(self.linear_args(x, packed, out, **more), shape)

    def serves(self, args: ctypes.Structure, shape: int) -> bool:
        """Whether a shape can do this call on this device."""
        return bool(self.c.kd_serves(ctypes.byref(args), shape))

    def choice(self, args: ctypes.Structure) -> tuple[int, bool]:
        """The shape that linear_cuda takes, and whether it reads weights early."""
        number = self.c.kd_choice(ctypes.byref(args))
        return number % 256, number >= 256

    def moe_args(self, x, experts: Experts, expert_id, weight, out, residual=None, num_rows_device=None):
        """The struct of moe_experts, with a poisoned workspace; it keeps its tensors alive."""
        fields = {
            "x": x, **experts._asdict(), "expert_id": expert_id, "weight": weight, "residual": residual, "out": out,
            "num_rows": x.shape[0], "dim": x.shape[1], "num_experts": experts.gate_up.shape[0],
            "top_k": expert_id.shape[1], "dtype": x.dtype, "num_rows_device": num_rows_device,
            "int4": experts.gate_up.dtype == torch.uint8,
        }  # fmt: skip
        args = fill("moe_experts", fields)
        num_bytes = max(1, self.c.kd_moe_workspace(ctypes.byref(args)))
        workspace = torch.full((num_bytes,), 255, dtype=torch.uint8, device=x.device)
        args.workspace = workspace.data_ptr()
        args.keep = (workspace, fields)
        return args

    def moe(self, args: ctypes.Structure) -> None:
        """moe_experts_cuda."""
        self._check(self.c.kd_moe(ctypes.byref(args), self._stream()), "moe_experts")

    def moe_with(self, args: ctypes.Structure, up: int, down: int) -> None:
        """moe_experts of INT4 experts by these shapes of the two grouped products."""
        status = self.c.kd_moe_with(ctypes.byref(args), up, down, self._stream())
        self._check(status, f"moe_experts, shapes {up} {down}")

    def rows_per_item(self, args: ctypes.Structure) -> int:
        """The most rows of one expert that a tile of moe_experts takes: the shapes must have as many."""
        return self.c.kd_moe_rows_per_item(ctypes.byref(args))


class Report:
    """What a run found, written to a JSON file as it goes, so that a run that was cut short can go on."""

    def __init__(self, path: Path) -> None:
        self.path, self.start = path, time.time()
        self.record: dict = json.loads(path.read_text()) if path.exists() else {}
        self.failures: list[str] = self.record.setdefault("failures", [])

    def save(self) -> None:
        """Writes the file."""
        self.path.write_text(json.dumps(self.record))

    def fail(self, text: str) -> None:
        """Notes a failed check."""
        self.failures.append(text)
        if len(self.failures) < 30:
            print("FAIL", text, flush=True)

    def say(self, text: str) -> None:
        """Prints with the seconds since the start."""
        print(text, f"t={time.time() - self.start:.1f} s", flush=True)


def bits(t: torch.Tensor) -> torch.Tensor:
    """The tensor as integers: equal only where every bit is."""
    return t.view(torch.int16 if t.dtype == torch.bfloat16 else torch.int32)


def error(out: torch.Tensor, ref: torch.Tensor) -> tuple[float, float]:
    """Relative error by norm, and the largest error over the largest value."""
    diff = out.double() - ref
    return (diff.norm() / ref.norm()).item(), (diff.abs().max() / ref.abs().max()).item()


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """NaN everywhere."""
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)
