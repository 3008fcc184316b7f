"""A record: measurements with the device, date, commit, versions and command that they came from."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kdtree_nb.bench.runner import Failure, Measurement
from kdtree_nb.kdtr import write_atomically
from kdtree_nb.native import cuda_toolchain, toolchain
from kdtree_nb.native.devices import device_label

_ROOT = Path(__file__).resolve().parents[2]
_MEASURED = ("kdtree_nb", "kernels", "data/tiny.kdtr", "data/prompts.json")
COMMIT_VARIABLE = "KDTREE_COMMIT"
"""Names the commit where the sources do not lie in their own git folder."""

_GPU_FIELDS = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "memory.total")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def make_record(
    measurements: Sequence[Measurement], command: str, device: str = "cpu", failures: Sequence[Failure] = ()
) -> dict[str, Any]:
    """The JSON fields that `viz.load_record` reads. command: as typed, without what names this machine."""
    set_here = [f"{name}={os.environ[name]} " for name in _THREAD_VARIABLES if name in os.environ]
    of_gpu = {"gpu": gpu_state()} if device == "cuda" else {}
    return {
        "device": device_label(device),
        "device_kind": device,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": versions(device),
        **of_gpu,
        "threads": torch.get_num_threads(),
        "command": "".join(set_here) + command,
        "failed": [dataclasses.asdict(failure) for failure in failures],
        "results": [m.to_dict() for m in measurements],
    }


def write_record(record: dict[str, Any], target: Path) -> Path:
    """Write atomically. `target` is a JSON file, or a folder in which the device names the file."""
    if target.suffix != ".json":
        target = target / f"{slug(record['device'])}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    results = [json.dumps(result, ensure_ascii=False) for result in record["results"]]
    head = json.dumps({k: v for k, v in record.items() if k != "results"}, ensure_ascii=False, indent=1)
    text = head.removesuffix("\n}") + ',\n "results": [\n  ' + ",\n  ".join(results) + "\n ]\n}\n"
    write_atomically(target, [text.encode()])
    return target


def slug(device: str) -> str:
    """A file name for a device: lower-case words joined by hyphens."""
    return "-".join(re.findall(r"[a-z0-9.]+", device.lower()))


def versions(device: str = "cpu") -> dict[str, str]:
    """Versions of what the times depend on."""
    compiler = toolchain.compiler_version(toolchain.find_compiler())
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "compiler": compiler,
    }
    if device == "cuda":
        text = cuda_toolchain.nvcc_version(cuda_toolchain.find_nvcc())[1]
        release = re.search(r"V(\d+\.\d+\.\d+)", text)
        found |= {"CUDA": str(torch.version.cuda), "nvcc": release[1] if release else text}
    return found


def gpu_state() -> dict[str, Any]:
    """What the driver says of the first GPU; empty where nvidia-smi does not answer."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = done.stdout.strip().split(", ")
    return dict(zip(_GPU_FIELDS, values, strict=False))


def commit() -> str:
    """KDTREE_COMMIT where it is set; else the hash of the checked-out commit, with `-dirty` if what is measured differs
    from it; "unknown" without git."""
    named = os.environ.get(COMMIT_VARIABLE)
    if named:
        return named
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--", *_MEASURED)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return f"{head}-dirty" if changed else head


def _git(*args: str) -> str:
    done = subprocess.run(["git", *args], cwd=_ROOT, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.strip()
