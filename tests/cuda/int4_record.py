"""What run_int4.py found, as a record of benchmarks: `int4_linear`, `int4_invariance_cost`, `int4_experts`,
`rank_linear`, `rank_chain`, `rank_layer`, `int4_checks`.

python tests/cuda/int4_record.py int4.json OUT.json     on the machine that found it
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from time_int4 import BYTES_PER_WEIGHT, EXPERTS, TOP_K

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from kdtree_nb.bench.record import make_record, write_record
from kdtree_nb.bench.runner import Measurement

COST = "int4_invariance_cost"
PEERS = {"matmul": "torch BF16", "int4pack_mm": "torch INT4", "ours": "native"}


def of_linear(found: dict[str, Any]) -> list[Measurement]:
    """Products [M, K] x [K, N] by time_int4's names and units, in seconds."""
    results = []
    for name, cell in found.get("times", {}).items():
        k, n, m = map(int, name.split())
        num_bytes = k * n * BYTES_PER_WEIGHT
        params = {"K": k, "N": n, "M": m, "dtype": "bfloat16", "bytes": int(num_bytes), "floor_s": cell["floor"] * 1e-6}
        params["shape"] = cell["chosen"]
        results += [
            Measurement(f"int4_linear/{PEERS[peer]}", [cell[peer] * 1e-6], params) for peer in PEERS if peer in cell
        ]
    return results


def of_cost(found: dict[str, Any]) -> list[Measurement]:
    """The shape that is chosen for so many rows against the fastest of all, of the same bits, and of torch's."""
    results = []
    for name, cell in found.get("times", {}).items():
        if not cell["shapes"]:
            continue
        k, n, m = map(int, name.split())
        shape, best = min(cell["shapes"].items(), key=lambda item: item[1])
        params = {"K": k, "N": n, "M": m, "dtype": "bfloat16", "chosen": cell["chosen"], "fastest": shape}
        theirs = min(cell["matmul"], cell.get("int4pack_mm", cell["matmul"]))
        contenders = {"invariant": cell["ours"], "best shape": min(best, cell["ours"]), "best torch": theirs}
        results += [Measurement(f"{COST}/{contender}", [us * 1e-6], params) for contender, us in contenders.items()]
    return results


def of_rank(found: dict[str, Any]) -> list[Measurement]:
    """A rank's BF16 products: torch's, as chosen, in the fastest shape, behind a norm by start; a layer of them."""
    results = []
    for name, cell in found.get("rank", {}).items():
        product, rows = name.rsplit(", ", 1)
        params = {"product": product, "rows": int(rows), "tp": 8, "dtype": "bfloat16", "floor_s": cell["floor"] * 1e-6}
        contenders = {"torch": (cell["torch"], ""), "native": (cell["ours"], cell["chosen"])}
        if cell["shapes"]:
            shape = min(cell["shapes"], key=cell["shapes"].get)
            contenders["fastest shape"] = (cell["shapes"][shape], shape)
        for contender, (us, shape) in contenders.items():
            results.append(Measurement(f"rank_linear/{contender}", [us * 1e-6], params | {"shape": shape}))
        for shape, times in cell.get("starts", {}).items():
            for start, us in times.items():
                results.append(Measurement(f"rank_chain/{start}", [us * 1e-6], params | {"shape": shape}))
    for name, us in found.get("rank_layer", {}).items():
        rows, kind, start = name.split(", ", 2)
        params = {"rows": int(rows), "tp": 8, "dtype": "bfloat16", "shapes": kind}
        results.append(Measurement(f"rank_layer/{start}", [us * 1e-6], params))
    return results


def of_experts(found: dict[str, Any]) -> list[Measurement]:
    """Layers of routed experts, without the shared one; shares: a rank's part, whose sums are left to be added."""
    results = []
    shares = [("int4_expert_shares", *item) for item in found.get("expert_shares", {}).items()]
    for group, name, cell in [*(("int4_experts", *item) for item in found.get("experts", {}).items()), *shares]:
        dim, width, rows = map(int, name.split())
        params = {"dim": dim, "width": width, "experts": EXPERTS, "top_k": TOP_K, "rows": rows, "dtype": "bfloat16"}
        params |= {"distinct_experts": cell["active"], "bytes": int(cell["bytes"]), "floor_s": cell["floor"] * 1e-6}
        results.append(Measurement(f"{group}/native", [cell["ours"] * 1e-6], params))
    return results


def measurements(found: dict[str, Any]) -> list[Measurement]:
    """Everything in the report of run_int4.py."""
    failures = len(found.get("failures", []))
    checks = Measurement("int4_checks/native", [found.get("checks", 0)], {"failures": failures}, "check")
    return [*of_linear(found), *of_cost(found), *of_experts(found), *of_rank(found), checks]


def main() -> None:
    """Read the report, write the record."""
    report, out = map(Path, sys.argv[1:])
    found = json.loads(report.read_text())
    print(write_record(make_record(measurements(found), "python tests/cuda/run_int4.py", "cuda"), out))


if __name__ == "__main__":
    main()
