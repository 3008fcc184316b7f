"""Checks and times verify_attn on this machine's GPU: `python tests/cuda/run_attn.py [check] [long] [time]`.

check: at least 1,000 random batches (prefix, tree, streams, dims, type), each compared bit by bit with one-token
decoding, prefill, every stream alone, every tiling. long: prefixes to 128 k. time: graph replays over rotating caches,
beside materialised torch matmul + softmax. Writes $OUT/attn.json. LIMIT_S bounds the whole run.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import time
import traceback
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import check_common
from check_attn import (
    BF16,
    F32,
    Batch,
    Dims,
    check_batch,
    check_invalid_rows,
    random_tree,
    tune,
)
from check_attn_one import check_chained, check_invalid_rows_of_one
from op_lib import library, run, workspace_bytes
from timing import copy_bandwidth, graph_time, graph_times, matmul_rate

START = time.time()
LIMIT_S = float(os.environ.get("LIMIT_S", "170"))
QUICK = bool(os.environ.get("QUICK"))  # few small batches, for compute-sanitizer
KIMI64, KIMI8 = Dims(64, 512, 64, BF16), Dims(8, 512, 64, BF16)
SMALL = [
    Dims(4, 64, 16, BF16),
    Dims(8, 96, 16, BF16),
    Dims(6, 48, 12, BF16),
    Dims(4, 64, 16, F32),
    Dims(6, 48, 12, F32),
]
BORDERS = (0, 1, 31, 32, 63, 64, 127, 128, 255, 256, 257, 500, 1023, 1024, 1919, 2047, 2048, 2303, 4096)
record: dict = {"failures": check_common.failures}


def left() -> float:
    return LIMIT_S - (time.time() - START)


def random_case(rng: random.Random, seed: int) -> tuple[str, Batch]:
    """A batch with dims, prefixes near leaf borders or anywhere, and trees drawn from `rng`."""
    dims = rng.choice([KIMI64, KIMI8, KIMI8, *SMALL, Dims(8, 512, 64, F32)])
    heavy = dims.latent == 512
    streams = rng.choice([1, 1, 1, 2, 3, 10]) if dims.heads < 64 else rng.choice([1, 1, 2])
    prefixes = [
        max(0, rng.choice(BORDERS) + rng.randint(-2, 2)) if rng.random() < 0.7 else rng.randrange(6000)
        for _ in range(streams)
    ]
    sizes = [rng.choice([1, 2, 7, 16, 33, 65] if heavy else [1, 3, 17, 64, 65, 200]) for _ in range(streams)]
    trees = [random_tree(n, rng, rng.choice(["mixed", "bushy", "chain"])) for n in sizes]
    name = f"case {seed} {dims.heads}x{dims.latent}+{dims.rope} {str(dims.dtype)[6:]} prefix {prefixes} nodes {sizes}"
    return name, Batch(dims, prefixes, trees, seed, heat=rng.choice([0.1, 1.0, 4.0]))


def check(budget_s: float, uses_wgmma: bool = True, first_seed: int = 0, most: int = 1200) -> None:
    """Random batches until `most` are done or the time is over; with Hopper's kernel or the one of other GPUs."""
    begin, worst, compared, cases = time.time(), {}, 0, 0
    tune(uses_wgmma=uses_wgmma)
    for dims in (KIMI64, KIMI8, *SMALL):
        check_invalid_rows(dims)
        check_invalid_rows_of_one(dims)
        if not QUICK:
            compared += check_chained(dims, first_seed)
        elif dims in (KIMI8, SMALL[1]):
            compared += check_chained(dims, first_seed, rounds=1, num_cuda_streams=2)
    while cases < most and time.time() - begin < budget_s and left() > 20:
        rng = random.Random(first_seed + cases)
        name, batch = random_case(rng, first_seed + cases)
        try:
            error, positions = check_batch(batch, name, rng, 1, cases % 4 == 0, uses_wgmma)
        except Exception as problem:
            check_common.expect(False, f"{name}: {problem}")
            if "CUDA error" in str(problem):
                raise
            continue
        key = str(batch.dims.dtype)[6:]
        worst[key] = max(worst.get(key, 0.0), error)
        compared, cases = compared + positions, cases + 1
    tune()
    kernel = "wgmma" if uses_wgmma else "mma"
    text = f"check ({kernel}): {cases} batches, {compared} positions compared, errors {worst}"
    print(f"{text}, failures so far {len(check_common.failures)}, t={time.time() - START:.0f}s", flush=True)
    record[f"check {kernel}"] = {"batches": cases, "positions": compared, "errors": worst}


def check_long() -> None:
    """Prefixes around the long leaf borders, to 128 k, and a large prefill."""
    cases = [
        (KIMI64, 20011, 65, 1),
        (KIMI8, 8190, 33, 2),
        (KIMI8, 8191, 33, 2),
        (KIMI8, 8192, 33, 2),
        (KIMI64, 32766, 33, 1),
        (KIMI8, 32767, 9, 2),
        (KIMI8, 33791, 9, 2),
        (KIMI64, 131071, 5, 1),
        (KIMI8, 131072, 9, 1),
        (KIMI8, 133119, 9, 1),
        (SMALL[3], 20011, 65, 2),
        (SMALL[0], 32766, 65, 2),
        (Dims(8, 512, 64, F32), 20011, 9, 1),
        (Dims(8, 512, 64, F32), 131070, 5, 1),
        (KIMI8, 100, 1024, 1),
    ]
    for seed, (dims, prefix, size, paths) in enumerate(cases):
        if left() < 20:
            print("long: out of time", flush=True)
            return
        rng = random.Random(seed)
        tree = random_tree(size, rng, "chain" if size == 1024 else "mixed")
        batch = Batch(dims, [prefix], [tree], seed, heat=2.0)
        error, compared = check_batch(batch, f"long {dims.heads}x{dims.latent} {prefix} {size}", rng, paths)
        what = f"long {dims.heads} heads {str(dims.dtype)[6:]} prefix {prefix} nodes {size}"
        print(f"{what}: error {error:.1e}, {compared} compared, {len(check_common.failures)} failed", flush=True)
        record.setdefault("long", []).append([dims.heads, str(dims.dtype), prefix, size, error, compared])


class TimedCell:
    """Heads x nodes x prefix over rotating caches (117 MB or more in all)."""

    def __init__(self, dims: Dims, nodes: int, prefix: int, big: torch.Tensor) -> None:
        self.dims, self.nodes, self.prefix = dims, nodes, prefix
        slots = (prefix + nodes + 63) // 64 * 64
        copies = max(2, min(64, math.ceil(170e6 / (slots * 1152)), len(big) // slots))
        self.caches = [big[i * slots : (i + 1) * slots] for i in range(copies)]
        tree = random_tree(nodes, random.Random(nodes), "mixed")
        self.mean_depth = sum(tree.depth) / nodes
        ints = {"device": "cuda", "dtype": torch.int32}
        self.out = torch.empty(nodes, dims.heads, dims.latent, dtype=dims.dtype, device="cuda")
        self.tensors = {
            "q_latent": torch.randn(nodes, dims.heads, dims.latent, device="cuda").to(dims.dtype),
            "q_rope": torch.randn(nodes, dims.heads, dims.rope, device="cuda").to(dims.dtype),
            "stream": torch.zeros(nodes, **ints),
            "node": torch.arange(nodes, **ints),
            "parent": torch.tensor([tree.parent], **ints),
            "depth": torch.tensor([tree.depth], **ints),
            "prefix_len": torch.tensor([prefix], **ints),
            "out": self.out,
        }
        self.fields = self.tensors | {
            "num_rows": nodes,
            "num_heads": dims.heads,
            "latent_dim": dims.latent,
            "rope_dim": dims.rope,
            "num_streams": 1,
            "num_slots": slots,
            "num_tree_slots": nodes,
            "scale": dims.scale,
            "dtype": dims.dtype,
        }
        size = workspace_bytes("verify_attn", **self.fields)
        self.fields |= {"workspace": torch.empty(size, dtype=torch.uint8, device="cuda"), "workspace_bytes": size}

    def call(self, cache: torch.Tensor) -> None:
        run("verify_attn", cache=cache, **self.fields)

    def torch_call(self, cache: torch.Tensor) -> torch.Tensor:
        """Materialised scores; the key count is a multiple of 64, so that cuBLAS stays on its aligned path."""
        query = torch.cat([self.tensors["q_latent"], self.tensors["q_rope"]], -1).flatten(0, 1)
        scores = (query @ cache.T).float() * self.dims.scale
        return torch.softmax(scores, -1).to(self.dims.dtype) @ cache[:, : self.dims.latent]


def time_cells(bandwidth: float, rate: float) -> None:
    """The table of the issue."""
    big = (torch.randn(4 * (131072 + 1024), 576, device="cuda") * 0.7).bfloat16()
    print("heads nodes prefix |      us  TFLOP/s  TB/s  x floor | torch us   ratio", flush=True)
    for prefix in (1024, 8192, 32768, 131072):
        for dims in (KIMI8, KIMI64):
            for nodes in (1, 8, 16, 33, 65):
                if left() < 6:
                    print("time: out of time", flush=True)
                    return
                cell = TimedCell(dims, nodes, prefix, big)
                times = graph_times([lambda c=c, cell=cell: cell.call(c) for c in cell.caches])
                seconds = sorted(times)[len(times) // 2]
                peer = graph_time([lambda c=c, cell=cell: cell.torch_call(c) for c in cell.caches[:8]], 3)
                flops = 2 * nodes * dims.heads * (prefix + cell.mean_depth + 1) * (2 * dims.latent + dims.rope)
                num_bytes = (prefix + nodes) * 1152
                floor = max(flops / rate, num_bytes / bandwidth)
                rates = f"{seconds * 1e6:7.1f} {flops / seconds / 1e12:8.1f} {num_bytes / seconds / 1e12:5.2f}"
                ratios = f"{seconds / floor:8.2f} | {peer * 1e6:8.1f} {peer / seconds:7.2f}"
                print(f"{dims.heads:5d} {nodes:5d} {prefix:6d} | {rates} {ratios}", flush=True)
                record.setdefault("time", []).append(
                    {
                        "heads": dims.heads,
                        "nodes": nodes,
                        "prefix": prefix,
                        "seconds": times,
                        "torch_s": peer,
                        "floor_s": floor,
                        "flops": flops,
                        "bytes": num_bytes,
                    }
                )
                del cell


def main() -> None:
    todo = sys.argv[1:] or ["check", "long", "time"]
    library()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, built at t={time.time() - START:.0f}s", flush=True
    )
    try:
        if "check" in todo:
            check(float(os.environ.get("CHECK_S", "70")), most=8 if QUICK else 1200)
            check(10, False, 100000, 3 if QUICK else 100)
        if "long" in todo:
            check_long()
        if "time" in todo:
            bandwidth, rate = copy_bandwidth(), matmul_rate()
            record["ceilings"] = {"copy_bytes_per_s": bandwidth, "bf16_flops_per_s": rate}
            print(f"copy {bandwidth / 1e12:.2f} TB/s, BF16 matmul {rate / 1e12:.0f} TFLOP/s", flush=True)
            time_cells(bandwidth, rate)
    except Exception:
        traceback.print_exc()
        check_common.failures.append("an exception ended the run")
    record["device"], record["num_checks"] = torch.cuda.get_device_name(), check_common.num_checks
    (Path(os.environ.get("OUT", ".")) / "attn.json").write_text(json.dumps(record))
    print(
        f"attn: {check_common.num_checks} checks, {len(check_common.failures)} failed, {time.time() - START:.0f} s",
        flush=True,
    )
    sys.exit(bool(check_common.failures))


if __name__ == "__main__":
    main()
