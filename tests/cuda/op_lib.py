"""Builds the CUDA kernels into one library and calls them on torch tensors without the bindings: ctypes, op_args.h.

The structs are read from kernels/op_args.h itself, so that they cannot drift. `run("rms_norm", x=…, …)` fills the
struct (tensors by pointer, fields left out by zero), launches on the current stream and raises unless the status is 0.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from op_structs import ROOT, args_name, args_type

OPS_BUILT = (
    "embed rms_norm rope swiglu residual_add argmax sample moe_route cache_append latent_append cache_compact "
    "verify_attn draft_topk tree_build tree_rows tree_accept"
).split()
STEMS = (
    "embed rms_norm rope swiglu argmax sample moe_route cache latent_append draft_topk tree_build tree_rows tree_accept"
).split()
DTYPES = {torch.float32: 0, torch.bfloat16: 1}


def shim_text() -> str:
    """C entry points, and verify_attn with tuning that a test can replace."""
    lines = ['#include "op_args.h"', '#include "attn_tuning_test.cuh"', '#include "verify_attn.cu"']
    for op in OPS_BUILT:
        lines.append(
            f'extern "C" int run_{op}(const kdtree::{args_name(op)}* a, void* s) {{ return kdtree::{op}_cuda(*a, s); }}'
        )
    for op in ("verify_attn", "draft_topk"):
        lines.append(
            f'extern "C" long bytes_{op}(const kdtree::{args_name(op)}* a) '
            f"{{ return kdtree::{op}_cuda_workspace_bytes(*a); }}"
        )
    return "\n".join(lines) + "\n"


def build(out: Path, arch: str) -> None:
    """Compiles every stem with nvcc for one architecture, in parallel, and links `out`."""
    with tempfile.TemporaryDirectory() as folder:
        shim = Path(folder) / "shim.cu"
        shim.write_text(shim_text())
        flags = [
            "-O3",
            "-std=c++17",
            "-fmad=false",
            f"-gencode=arch=compute_{arch},code=sm_{arch}",
            "-Xcompiler",
            "-fPIC",
        ]
        flags += [f"-I{ROOT / 'kernels'}", f"-I{Path(__file__).parent}"]

        def compile_one(source: Path) -> str:
            to = str(Path(folder) / f"{source.stem}.o")
            subprocess.run(["nvcc", *flags, "-c", str(source), "-o", to], check=True)
            return to

        sources = [ROOT / f"kernels/{stem}.cu" for stem in STEMS] + [shim]
        with ThreadPoolExecutor(int(os.environ.get("JOBS", "14"))) as pool:
            objects = list(pool.map(compile_one, sources))
        subprocess.run(["nvcc", "-shared", "-o", str(out), *objects], check=True)


@functools.cache
def library() -> ctypes.CDLL:
    """The library named by KDTREE_OPS_SO if it loads here, else one compiled now."""
    prebuilt = os.environ.get("KDTREE_OPS_SO", "")
    if prebuilt:
        try:
            return ctypes.CDLL(prebuilt)
        except OSError as error:
            print(f"{prebuilt} does not load here ({error}); compiling", flush=True)
    major, minor = torch.cuda.get_device_capability()
    out = Path(tempfile.mkdtemp()) / "ops.so"
    build(out, f"{major}{minor}{'a' if major == 9 else ''}")
    return ctypes.CDLL(str(out))


def fill(op: str, fields: dict[str, Any]) -> ctypes.Structure:
    """The struct of an operation; a tensor becomes its pointer, a torch dtype its number."""
    args = args_type(op)()
    known = {name for name, _ in args._fields_}
    if unknown := set(fields) - known:
        raise ValueError(f"{op}: expected fields of {sorted(known)}, got {sorted(unknown)}")
    for name, value in fields.items():
        if isinstance(value, torch.Tensor):
            value = value.data_ptr()
        elif isinstance(value, torch.dtype):
            value = DTYPES[value]
        setattr(args, name, value)
    return args


def status_of(op: str, **fields: Any) -> int:
    """Launches on the current stream; the status of the call."""
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    return getattr(library(), f"run_{op}")(ctypes.byref(fill(op, fields)), stream)


def run(op: str, **fields: Any) -> None:
    """Launches on the current stream. Raises RuntimeError on any status but 0."""
    if status := status_of(op, **fields):
        raise RuntimeError(f"{op}: expected status 0, got {status}")


def workspace_bytes(op: str, **fields: Any) -> int:
    """Bytes of workspace that the arguments ask for."""
    function = getattr(library(), f"bytes_{op}")
    function.restype = ctypes.c_long
    return function(ctypes.byref(fill(op, fields)))


if __name__ == "__main__":  # python tests/cuda/op_lib.py OUT.so 90a
    import sys

    build(Path(sys.argv[1]), sys.argv[2])
