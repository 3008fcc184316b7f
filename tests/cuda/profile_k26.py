"""What Nsight Compute says of every kernel in a step of one rank of eight of Kimi K2.6, two layers of it:

    ncu --profile-from-start off --section SpeedOfLight --section Occupancy --section WarpStateStats \\
        --section LaunchStats --csv --page raw python tests/cuda/profile_k26.py > profile.csv
    python tests/cuda/profile_k26.py profile.csv OUT.json        # a record of it, on the same machine

ncu holds the clocks at their base and runs each kernel alone with cold caches: its times compare kernels with each
other, and are longer than those of a step.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from kdtree_nb.bench import k26_sizes
from kdtree_nb.bench.kernel_times import short_name
from kdtree_nb.bench.record import make_record, write_record
from kdtree_nb.bench.runner import Measurement

ROWS, NUM_LAYERS, PREFIX_LEN = (1, 16), 2, 1024
COLUMNS = {
    "dram_percent": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "warps_active_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "blocks": "launch__grid_size",
    "waves": "launch__waves_per_multiprocessor",
}
STALL, STALL_END = "smsp__average_warps_issue_stalled_", "_per_issue_active.ratio"


def run() -> None:
    """The steps that are profiled: the second of each number of rows."""
    import torch

    from kdtree_nb.bench.rank import Rank, Step, bushy_tree
    from kdtree_nb.hf.config import read_config

    config, device = k26_sizes.with_layers(read_config(Path(k26_sizes.CONFIG)), NUM_LAYERS), torch.device("cuda")
    with torch.inference_mode():
        rank = Rank(config, 8, device, 2 * PREFIX_LEN)
        rank.prefix_len.fill_(PREFIX_LEN)
        for rows in ROWS:
            step = Step(rank, bushy_tree(rows, config.model.vocab_size, device))
            step()
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            step()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


def measurements(lines: Iterable[str]) -> list[Measurement]:
    """Of the csv text: `ncu/<kernel>` in the order of launches, seconds, with COLUMNS and the two largest stall reasons
    (warps stalled per issue) among the params. A step begins with tree_rows. Raises ValueError for other text."""
    head, units, *rows = list(csv.reader(line for line in lines if line.startswith('"'))) or [[], []]
    if "gpu__time_duration.sum" not in head or units[head.index("gpu__time_duration.sum")] != "ns":
        raise ValueError(f"profile_k26: expected the raw page of ncu with durations in ns, got columns {head[:5]}")
    found, step, place = [], -1, 0
    for row in rows:
        cells = dict(zip(head, row, strict=True))
        name = short_name(cells["Kernel Name"].replace("unnamed>::", ""))
        step, place = (step + 1, 0) if name == "tree_rows_kernel" else (step, place + 1)
        reasons = [c for c in cells if c.startswith(STALL) and c.endswith(STALL_END)]
        stalls = sorted(((_number(cells[c]), c) for c in reasons), reverse=True)[:2]
        params: dict[str, Any] = {"rows": ROWS[step], "place": place}
        params |= {key: _number(cells[column]) for key, column in COLUMNS.items()}
        params["stalls"] = {c.removeprefix(STALL).removesuffix(STALL_END): value for value, c in stalls}
        found.append(Measurement(f"ncu/{name}", [_number(cells["gpu__time_duration.sum"]) * 1e-9], params))
    return found


def _number(text: str) -> float:
    return float(text.replace(",", "") or "nan")


def main() -> None:
    """Profile, or make a record of a profile."""
    if len(sys.argv) == 1:
        return run()
    source, out = map(Path, sys.argv[1:])
    found = measurements(source.read_text().splitlines())
    print(write_record(make_record(found, "ncu … python tests/cuda/profile_k26.py", "cuda"), out))
    return None


if __name__ == "__main__":
    main()
