"""Times verify_attn on this machine's GPU, versions of it by turns: `python tests/cuda/time_attn.py [FOLDER ...]`.

A version is a folder of kernels; `kernels` of this checkout is always the last. Cells: Kimi's dimensions with 8 and 64
heads, and nano-k2's; prefixes to 128 k, 1 to 64 rows of one stream. A sample is a graph of calls over caches in turn.
In `step` each call comes behind a cache_append as in a model, and the time of that kernel alone is taken off. Also says
in which cells versions differ in a bit. Writes $OUT/attn_times.json. LIMIT_S bounds the whole run.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from check_attn import BF16, Dims, random_tree
from check_common import same_bits
from op_lib import fill
from op_structs import ROOT

START = time.time()
LIMIT_S = float(os.environ.get("LIMIT_S", "100"))
MODELS = {"kimi 8": Dims(8, 512, 64, BF16), "kimi 64": Dims(64, 512, 64, BF16), "nano-k2": Dims(8, 96, 16, BF16)}
PREFIXES = {"kimi 8": (1024, 8192, 32768, 131072), "kimi 64": (1024, 8192, 32768, 131072), "nano-k2": (64, 500, 1500)}
ROWS = (1, 4, 17, 64)
SHIM = """#include "op_args.h"
#include "verify_attn.cu"
#include "cache.cu"
extern "C" int attend(const kdtree::VerifyAttnArgs* a, void* s) { return kdtree::verify_attn_cuda(*a, s); }
extern "C" int append(const kdtree::CacheAppendArgs* a, void* s) { return kdtree::cache_append_cuda(*a, s); }
extern "C" long workspace(const kdtree::VerifyAttnArgs* a) { return kdtree::verify_attn_cuda_workspace_bytes(*a); }
"""


def build(kernels: Path) -> ctypes.CDLL:
    """The two operations of a folder of kernels."""
    major, minor = torch.cuda.get_device_capability()
    arch = f"{major}{minor}a" if major == 9 else f"{major}{minor}"
    folder = Path(tempfile.mkdtemp())
    (folder / "shim.cu").write_text(SHIM)
    flags = ["-O3", "-std=c++17", "-fmad=false", f"-gencode=arch=compute_{arch},code=sm_{arch}", "-Xcompiler", "-fPIC"]
    command = ["nvcc", *flags, f"-I{kernels}", "-shared", "-o", str(folder / "attn.so"), str(folder / "shim.cu")]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(folder / "attn.so"))
    library.workspace.restype = ctypes.c_long
    return library


class Cell:
    """Rows of one tree behind a prefix, over caches that together are larger than the L2 cache."""

    def __init__(self, dims: Dims, rows: int, prefix: int, keys: torch.Tensor) -> None:
        width, ints = dims.latent + dims.rope, {"dtype": torch.int32, "device": "cuda"}
        slots = (prefix + rows + 63) // 64 * 64
        copies = max(2, min(48, -(-170_000_000 // (slots * width * 2)), keys.numel() // (slots * width)))
        self.caches = [keys.flatten()[i * slots * width :][: slots * width] for i in range(copies)]
        tree = random_tree(rows, random.Random(rows), "mixed")
        self.out = torch.empty(rows, dims.heads, dims.latent, dtype=BF16, device="cuda")
        queries = [torch.randn(rows, dims.heads, n, device="cuda").to(BF16) for n in (dims.latent, dims.rope)]
        lists = {"stream": [0] * rows, "node": list(range(rows)), "parent": tree.parent, "depth": tree.depth}
        tensors = {name: torch.tensor(values, **ints) for name, values in lists.items()}
        tensors |= {"q_latent": queries[0], "q_rope": queries[1], "out": self.out}
        tensors |= {"prefix_len": torch.tensor([prefix], **ints), "num_rows_device": torch.tensor([rows], **ints)}
        sizes = {"num_rows": rows, "num_heads": dims.heads, "latent_dim": dims.latent, "rope_dim": dims.rope}
        sizes |= {"num_streams": 1, "num_slots": slots, "num_tree_slots": rows}
        self.fields = tensors | sizes | {"scale": dims.scale, "dtype": BF16}
        self.appended = {"latent": queries[0][:, 0].contiguous(), "k_rope": queries[1][:, 0].contiguous()}
        self.appended |= {"stream": tensors["stream"], "slot": prefix + tensors["node"], "num_rows": rows}
        self.appended |= {name: sizes[name] for name in ("num_streams", "num_slots", "latent_dim", "rope_dim")}
        self.appended |= {"dtype": BF16}

    def append(self, library: ctypes.CDLL, cache: torch.Tensor) -> None:
        """The rows' latents go to the cache."""
        status = library.append(ctypes.byref(fill("cache_append", self.appended | {"cache": cache})), stream())
        if status:
            raise RuntimeError(f"cache_append: expected status 0, got {status}")

    def attend(self, library: ctypes.CDLL, cache: torch.Tensor) -> None:
        """The operation; its workspace is allocated as the bindings do."""
        fields = self.fields | {"cache": cache}
        size = library.workspace(ctypes.byref(fill("verify_attn", fields)))
        workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
        fields |= {"workspace": workspace, "workspace_bytes": size}
        if status := library.attend(ctypes.byref(fill("verify_attn", fields)), stream()):
            raise RuntimeError(f"verify_attn: expected status 0, got {status}")


def stream() -> ctypes.c_void_p:
    """The current CUDA stream."""
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


def captured(call: Callable[[torch.Tensor], None], caches: list[torch.Tensor]) -> torch.cuda.CUDAGraph:
    """A graph of one call for each cache."""
    call(caches[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for cache in caches:
            call(cache)
    graph.replay()
    torch.cuda.synchronize()
    return graph


def medians(graphs: list[torch.cuda.CUDAGraph], calls: int, turns: int = 9) -> list[float]:
    """Microseconds of a call, for graphs that are replayed by turns."""
    samples: list[list[float]] = [[] for _ in graphs]
    for _ in range(turns):
        for graph, times in zip(graphs, samples, strict=True):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / calls)
    return [statistics.median(times) for times in samples]


def measure(cell: Cell, versions: list[ctypes.CDLL]) -> dict[str, list[float] | bool]:
    """Microseconds by version, back to back and in a step, and whether all have the same bits."""
    outs = []
    for library in versions:
        cell.attend(library, cell.caches[0])
        outs.append(cell.out.clone())
    graphs = [captured(lambda cache, lib=lib: cell.attend(lib, cache), cell.caches) for lib in versions]

    def step(library: ctypes.CDLL, cache: torch.Tensor) -> None:
        cell.append(library, cache)
        cell.attend(library, cache)

    graphs += [captured(lambda cache, lib=lib: step(lib, cache), cell.caches) for lib in versions]
    graphs.append(captured(lambda cache: cell.append(versions[-1], cache), cell.caches))
    *times, alone = medians(graphs, len(cell.caches))
    return {
        "back_to_back": times[: len(versions)],
        "step": [t - alone for t in times[len(versions) :]],
        "same_bits": all(same_bits(out, outs[-1]) for out in outs),
    }


def main() -> None:
    folders = [*map(Path, sys.argv[1:]), ROOT / "kernels"]
    with ThreadPoolExecutor() as pool:
        versions = list(pool.map(build, folders))
    print(
        f"{torch.cuda.get_device_name()}, built at t={time.time() - START:.0f}s: {[str(f) for f in folders]}",
        flush=True,
    )
    keys = (torch.randn(2 * (131072 + 128), 576, device="cuda") * 0.7).to(BF16)
    record = []
    for model, dims in MODELS.items():
        for prefix in PREFIXES[model]:
            for rows in ROWS:
                if time.time() - START > LIMIT_S:
                    print("out of time", flush=True)
                    break
                found = measure(Cell(dims, rows, prefix, keys), versions)
                record.append({"model": model, "prefix_len": prefix, "rows": rows} | found)
                columns = [" ".join(f"{t:8.2f}" for t in found[name]) for name in ("back_to_back", "step")]
                bits = "" if found["same_bits"] else "  other bits"
                print(f"{model:8s} {prefix:7d} {rows:3d} | {columns[0]} | step {columns[1]}{bits}", flush=True)
    (Path(os.environ.get("OUT", ".")) / "attn_times.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main()
