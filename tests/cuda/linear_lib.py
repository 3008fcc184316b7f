"""Builds and loads the CUDA linear and moe_experts for run_linear.py: ctypes over the pointers of tensors."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("kernels/linear.cu", "kernels/moe_experts.cu", "kernels/swiglu.cu", "tests/cuda/shim_linear.cu")
PTR, I64, I32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class PackLinearArgs(ctypes.Structure):
    """Mirror of op_args.h."""

    _fields_ = [
        ("weight", PTR),
        ("packed", PTR),
        ("num_groups", I64),
        ("num_out", I64),
        ("num_in", I64),
        ("dtype", I32),
    ]


class LinearArgs(ctypes.Structure):
    """Mirror of op_args.h."""

    _fields_ = [
        *((n, PTR) for n in ("x", "packed", "residual", "out")),
        *((n, I64) for n in ("num_rows", "num_groups", "num_out", "num_in", "x_row_stride", "x_group_stride")),
        ("dtype", I32), ("out_dtype", I32), ("num_threads", I32), ("num_rows_device", PTR),
        ("weights_settled", ctypes.c_bool),
    ]  # fmt: skip


class MoeExpertsArgs(ctypes.Structure):
    """Mirror of op_args.h."""

    _fields_ = [
        *((n, PTR) for n in ("x", "gate_up", "down", "shared_gate_up", "shared_down")),
        *((n, PTR) for n in ("expert_id", "weight", "residual", "out")),
        *((n, I64) for n in ("num_rows", "dim", "num_experts", "top_k", "width", "shared_width")),
        ("dtype", I32), ("num_threads", I32), ("num_rows_device", PTR), ("workspace", PTR),
    ]  # fmt: skip


def build() -> ctypes.CDLL:
    """Returns the library named by KDTREE_LINEAR_SO if it loads here, else one compiled now."""
    prebuilt = os.environ.get("KDTREE_LINEAR_SO", "")
    if prebuilt:
        try:
            return ctypes.CDLL(prebuilt)
        except OSError as error:
            print("building here:", error, flush=True)
    folder = Path(tempfile.mkdtemp())
    arch = "".join(map(str, torch.cuda.get_device_capability()))
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


def code(dtype: torch.dtype) -> int:
    return 0 if dtype == torch.float32 else 1


def pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@dataclass(frozen=True)
class Shape:
    index: int
    name: str
    num_rows: int
    num_out: int
    cluster: int


class Lib:
    """The library's functions on torch tensors; any status but 0 raises."""

    def __init__(self) -> None:
        self.c = build()
        self.c.kd_shape.restype = ctypes.c_char_p
        self.c.kd_moe_workspace.restype = I64
        for name in ("kd_pack", "kd_moe"):
            getattr(self.c, name).argtypes = [PTR, PTR]
        self.c.kd_linear.argtypes = [PTR, ctypes.c_int, PTR]

    @staticmethod
    def _check(status: int, what: str) -> None:
        if status:
            raise RuntimeError(f"{what}: status {status}")

    @staticmethod
    def _stream() -> int:
        return torch.cuda.current_stream().cuda_stream

    def shapes(self, dtype: torch.dtype) -> list[Shape]:
        """All tile shapes of linear for a dtype."""
        out, numbers = [], (ctypes.c_int * 3)()
        for i in range(self.c.kd_num_shapes(code(dtype))):
            name = self.c.kd_shape(code(dtype), i, numbers).decode().split(", ", 1)
            out.append(Shape(i, name[-1].replace(", ", "-"), *numbers))
        return out

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """weight [G, N, K] -> packed [G, ceil(N/16), ceil(K/32), 512]."""
        g, n, k = weight.shape
        packed = torch.full((g, -(-n // 16), -(-k // 32), 512), float("nan"), dtype=weight.dtype, device=weight.device)
        args = PackLinearArgs(pointer(weight), pointer(packed), g, n, k, code(weight.dtype))
        self._check(self.c.kd_pack(ctypes.byref(args), self._stream()), "pack_linear")
        return packed

    def linear_args(self, x, packed, out, residual=None, num_rows_device=None, settled=False) -> LinearArgs:
        """x [T, G, K] with any row and group stride, out [T, G, N]."""
        t, g, n = out.shape
        return LinearArgs(
            pointer(x), pointer(packed), pointer(residual), pointer(out), t, g, n, x.shape[2], x.stride(0), x.stride(1),
            code(x.dtype), code(out.dtype), 1, pointer(num_rows_device), settled,
        )  # fmt: skip

    def run(self, args: LinearArgs, shape: int = -1) -> None:
        self._check(self.c.kd_linear(ctypes.byref(args), shape, self._stream()), f"linear shape {shape}")

    def linear(self, x, packed, out, shape=-1, **more) -> None:
        self.run(self.linear_args(x, packed, out, **more), shape)

    def choice(self, args: LinearArgs, clusters: bool = True) -> int:
        return self.c.kd_choice(ctypes.byref(args), int(clusters))

    def moe_args(self, x, experts, expert_id, weight, out, residual=None, num_rows_device=None) -> MoeExpertsArgs:
        """experts = (gate_up, down, shared_gate_up | None, shared_down | None, width, shared_width), packed. The
        struct keeps its tensors alive."""
        gate_up, down, shared_gate_up, shared_down, width, shared_width = experts
        args = MoeExpertsArgs(
            *map(pointer, (x, gate_up, down, shared_gate_up, shared_down, expert_id, weight, residual, out)),
            *x.shape, gate_up.shape[0], expert_id.shape[1], width, shared_width, code(x.dtype), 1,
            pointer(num_rows_device), None,
        )  # fmt: skip
        num_bytes = max(1, self.c.kd_moe_workspace(ctypes.byref(args)))
        workspace = torch.full((num_bytes,), 255, dtype=torch.uint8, device=x.device)
        args.workspace = pointer(workspace)
        args.keep = (workspace, x, experts, expert_id, weight, out, residual, num_rows_device)
        return args

    def moe(self, args: MoeExpertsArgs) -> None:
        self._check(self.c.kd_moe(ctypes.byref(args), self._stream()), "moe_experts")
