"""Times verify_attn for few queries on this machine's Hopper GPU, by the kernel for them and by the one for many:
`python tests/cuda/time_attn_few.py`.

Kimi's dimensions with 8 heads and 64; 1 to 8 rows of one stream behind prefixes to 128 k, and 1 row of 64 heads. Graphs
of calls over caches in turn, more than the L2 cache holds, replayed by turns: the kernel for few queries, the one for
many, and what the library chooses, each with the fold behind it. Also says where the bits differ. Writes
$OUT/attn_few_times.json. LIMIT_S bounds the whole run.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from check_attn import tune
from check_common import same_bits
from op_lib import library
from run_attn import KIMI8, KIMI64, TimedCell
from time_attn import captured, medians
from timing import copy_bandwidth

START = time.time()
LIMIT_S = float(os.environ.get("LIMIT_S", "150"))
CELLS = [(KIMI8, rows) for rows in (1, 2, 4, 8)] + [(KIMI64, 1)]


def measure(cell: TimedCell) -> dict[str, float | bool]:
    """Microseconds of a call by both kernels and by the choice of the library, and whether the bits are the same."""
    outs, graphs = [], []
    for uses_few in (True, False, None):
        tune(uses_few=uses_few)
        cell.out.fill_(float("nan"))
        cell.call(cell.caches[0])
        outs.append(cell.out.clone())
        graphs.append(captured(cell.call, cell.caches))
    tune()
    few, many, chosen = medians(graphs, len(cell.caches))
    same = same_bits(outs[0], outs[1]) and same_bits(outs[0], outs[2])
    return {"few_us": few, "many_us": many, "chosen_us": chosen, "same_bits": same}


def main() -> None:
    library()
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e12:.2f} TB/s, t={time.time() - START:.0f}s", flush=True)
    big = (torch.randn(4 * (131072 + 1024), 576, device="cuda") * 0.7).bfloat16()
    print("heads rows prefix | few us  many us  chosen us | x memory of few, many", flush=True)
    records = []
    for prefix in (1024, 8192, 32768, 131072):
        for dims, rows in CELLS:
            if time.time() - START > LIMIT_S:
                print("out of time", flush=True)
                break
            found = measure(TimedCell(dims, rows, prefix, big))
            floor = (prefix + rows) * 1152 / bandwidth * 1e6
            records.append({"heads": dims.heads, "rows": rows, "prefix_len": prefix, "floor_us": floor} | found)
            times = f"{found['few_us']:7.2f} {found['many_us']:7.2f} {found['chosen_us']:7.2f}"
            ratios = f"{found['few_us'] / floor:6.2f} {found['many_us'] / floor:6.2f}"
            bits = "" if found["same_bits"] else "  other bits"
            print(f"{dims.heads:5d} {rows:4d} {prefix:6d} | {times} | {ratios}{bits}", flush=True)
    (Path(os.environ.get("OUT", ".")) / "attn_few_times.json").write_text(json.dumps(records))


if __name__ == "__main__":
    main()
