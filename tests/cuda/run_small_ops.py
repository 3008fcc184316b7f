"""Checks and times the row-wise and tree kernels on this machine's GPU: `python run_small_ops.py [check] [time]`.

Oracles: kdtree_nb.reference. Times: graph replays; the tree pipeline beside our own rendering of the published one
(top-k on the GPU, copies, a Python heap, mask upload, a walk on the host). Writes $OUT/small_ops.json.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import traceback
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import check_common
import check_rows
import check_trees
from check_common import BF16, DEV
from op_lib import library, run
from time_trees import VOCAB, time_trees
from timing import graph_times

START = time.time()
record: dict = {"failures": check_common.failures}


def report(name: str, times: list[float]) -> float:
    seconds = statistics.median(times)
    print(f"{name:58s} {seconds * 1e6:8.1f} us", flush=True)
    record.setdefault("time", {})[name] = times
    return seconds


def time_op(name: str, op: str, **fields: object) -> None:
    report(name, graph_times([lambda: run(op, **fields)] * 20))


def time_rows(rows: int) -> None:
    logits = [torch.randn(rows, VOCAB, device=DEV) for _ in range(16 if rows == 1 else 4)]
    token = torch.zeros(rows, dtype=torch.int64, device=DEV)

    def choose(x: torch.Tensor) -> None:
        run("argmax", logits=x, token=token, num_rows=rows, vocab_size=VOCAB)

    report(f"argmax {rows}x{VOCAB}", graph_times([lambda x=x: choose(x) for x in logits]))
    x, weight = torch.randn(rows, 7168, device=DEV).to(BF16), torch.randn(7168, device=DEV).to(BF16)
    common = {"num_rows": rows, "dtype": BF16}
    time_op(
        f"rms_norm {rows}x7168",
        "rms_norm",
        x=x,
        weight=weight,
        out=torch.empty_like(x),
        dim=7168,
        x_stride=7168,
        eps=1e-6,
        weights_settled=True,
        **common,
    )
    time_latent_append(rows)
    gate_up = torch.randn(rows, 2 * 18432, device=DEV).to(BF16)
    act = torch.empty(rows, 18432, dtype=BF16, device=DEV)
    time_op(f"swiglu {rows}x18432", "swiglu", gate_up=gate_up, out=act, dim=18432, **common)
    router, bias = torch.randn(rows, 384, device=DEV), torch.randn(384, device=DEV)
    ids, gates = torch.zeros(rows, 8, dtype=torch.int32, device=DEV), torch.zeros(rows, 8, device=DEV)
    time_op(
        f"moe_route {rows}x384 top 8",
        "moe_route",
        logits=router,
        bias=bias,
        expert_id=ids,
        weight=gates,
        num_rows=rows,
        num_experts=384,
        top_k=8,
        scoring=1,
        renormalize=True,
        scaling_factor=2.827,
    )


def time_latent_append(rows: int) -> None:
    """At K2.6's shapes, beside the four launches that it stands for."""
    sizes = query, latent, key = 1536, 512, 64
    joint, cache = torch.randn(rows, sum(sizes), device=DEV).to(BF16), torch.zeros(1, 4096, 576, dtype=BF16, device=DEV)
    weights = [torch.randn(n, device=DEV).to(BF16) for n in sizes]
    out = [torch.empty(rows, n, dtype=BF16, device=DEV) for n in sizes]
    cos_sin, zeros = torch.randn(4096, key, device=DEV), torch.zeros(rows, dtype=torch.int32, device=DEV)
    common = {"num_rows": rows, "dtype": BF16}
    place = {"position": torch.arange(rows, dtype=torch.int32, device=DEV), "cos_sin": cos_sin, "num_positions": 4096}
    to = {"stream": zeros, "slot": place["position"], "cache": cache, "num_streams": 1, "num_slots": 4096,
          "latent_dim": latent, "rope_dim": key, **common}  # fmt: skip
    norm = {"x_stride": sum(sizes), "eps": 1e-6, "weights_settled": True, **common}

    def apart() -> None:
        run("rms_norm", x=joint, weight=weights[0], out=out[0], dim=query, **norm)
        run("rms_norm", x=joint[:, query:], weight=weights[1], out=out[1], dim=latent, **norm)
        run("rope", x=joint[:, query + latent :], out=out[2], num_heads=1, dim=key, x_row_stride=sum(sizes),
            x_head_stride=key, **place, **common)  # fmt: skip
        run("cache_append", latent=out[1], k_rope=out[2], **to)

    report(f"latent_append {rows}: four launches", graph_times([apart] * 20))
    time_op(f"latent_append {rows}", "latent_append", q_kv=joint, q_norm=weights[0], kv_norm=weights[1], q=out[0],
            query_dim=query, q_kv_stride=sum(sizes), eps=1e-6, weights_settled=True, **place, **to)  # fmt: skip


def main() -> None:
    todo = sys.argv[1:] or ["check", "time"]
    library()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, built at t={time.time() - START:.0f}s", flush=True
    )
    try:
        if "check" in todo:
            for check in (check_rows.check_rows, check_trees.check_trees):
                check()
                print(
                    f"{check.__name__}: {check_common.num_checks} checks, {len(check_common.failures)} failed, "
                    f"t={time.time() - START:.0f}s",
                    flush=True,
                )
        if "time" in todo:
            time_trees(report)
            for rows in (1, 65):
                time_rows(rows)
    except Exception:
        traceback.print_exc()
        check_common.failures.append("an exception ended the run")
    record["device"], record["num_checks"] = torch.cuda.get_device_name(), check_common.num_checks
    (Path(os.environ.get("OUT", ".")) / "small_ops.json").write_text(json.dumps(record))
    print(f"small ops: {check_common.num_checks} checks, {len(check_common.failures)} failed", flush=True)
    sys.exit(bool(check_common.failures))


if __name__ == "__main__":
    main()
