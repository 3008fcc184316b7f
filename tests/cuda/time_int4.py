"""Times of linear and moe_experts with INT4 weights by graph replays over rotating weights, beside torch.matmul in
BF16, torch's own INT4 product, and the floor of reading the weights once at the bandwidth of a copy."""

from __future__ import annotations

import time

import torch
from linear_lib import DEVICE, Experts, Lib
from steps import Steps
from time_rank import table as table_of_rank
from time_rank import time_rank
from timing import copy_bandwidth, graph_time

SHAPES = ((7168, 4096), (2048, 7168), (7168, 18432), (18432, 7168))  # K, N
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
ROWS_OF_ALL = (1, 8, 16, 32, 64, 128)  # where every tile shape is timed, beside the one that is chosen
BYTES_PER_WEIGHT = 0.5 + 2 / 32
EXPERTS, TOP_K = 384, 8


def random_packed(*blocks: int) -> torch.Tensor:
    """Packed INT4 weights u8 [G, columns, units, 4, 288] of random values and scales."""
    data = torch.randint(0, 256, (*blocks, 4, 288), device=DEVICE, dtype=torch.uint8)
    scale = (torch.randn(*blocks, 4, 16, device=DEVICE) * 0.01).bfloat16()
    data[..., 256:] = scale.view(torch.uint8)
    return data


def graph_us(calls: list, num_calls: int = 24) -> float:
    """Median microseconds of a call."""
    return graph_time(calls * max(1, num_calls // len(calls)), 5) * 1e6


def library_int4(n: int, k: int, count: int) -> list:
    """Weights and scales for torch._weight_int4pack_mm; none where torch has no such product here."""
    try:
        values = torch.randint(0, 256, (n, k // 2), device=DEVICE, dtype=torch.uint8)
        scale = torch.stack([torch.rand(k // 32, n, device=DEVICE), torch.zeros(k // 32, n, device=DEVICE)], dim=2)
        packed = torch._convert_weight_to_int4pack(values, 8)
        torch._weight_int4pack_mm(torch.zeros(1, k, device=DEVICE).bfloat16(), packed, 32, scale.bfloat16())
    except (RuntimeError, AttributeError) as error:
        print("torch._weight_int4pack_mm:", error, flush=True)
        return []
    return [(packed.clone(), scale.bfloat16()) for _ in range(count)]


def time_cell(lib: Lib, x: torch.Tensor, plain: list, packed: list, theirs: list) -> dict:
    """Microseconds of torch's products, of linear_cuda and of every fitting tile shape."""
    rows, n = x.shape[0], plain[0].shape[0]
    out, flat = torch.empty(rows, 1, n, device=DEVICE, dtype=torch.bfloat16), x[:, 0]
    cell = {"matmul": graph_us([lambda w=w: torch.matmul(flat, w.t(), out=out[:, 0]) for w in plain]), "shapes": {}}
    if theirs:
        cell["int4pack_mm"] = graph_us([lambda w=w: torch._weight_int4pack_mm(flat, w[0], 32, w[1]) for w in theirs])
    args = [lib.linear_args(x, p, out, settled=True) for p in packed]
    choice, cell["early"] = lib.choice(args[0])
    shapes = lib.int4_shapes()
    smallest = min(shape.num_rows for shape in shapes if shape.num_rows >= min(rows, 128))
    chosen = next((s for s in shapes if s.index == choice), None)
    if chosen is None:  # it is not to be run
        chosen = next(shape for shape in shapes if shape.num_rows == smallest)
        cell["ours"] = graph_us([lambda a=a: lib.run(a, chosen.index) for a in args])
    else:
        cell["ours"] = graph_us([lambda a=a: lib.run(a) for a in args])
    cell["chosen"] = chosen.name
    for shape in shapes if rows in ROWS_OF_ALL else ():
        near = rows <= 2 * shape.num_rows and shape.num_rows <= 2 * smallest  # more rows, or tiles side by side
        if near and lib.serves(args[0], shape.index):
            cell["shapes"][shape.name] = graph_us([lambda a=a, s=shape: lib.run(a, s.index) for a in args])
    return cell


def time_linear(lib: Lib, report: Steps, bandwidth: float, limit_s: float) -> None:
    """Fills report.record["times"]; leaves out what is there already."""
    times = report.record.setdefault("times", {})
    for k, n in SHAPES:
        num_sets = max(4, -(-330_000_000 // int(k * n * BYTES_PER_WEIGHT)))  # more than the cache holds
        plain = [(torch.randn(n, k, device=DEVICE) * k**-0.5).bfloat16() for _ in range(4)]
        packed = [random_packed(1, n // 64, k // 32) for _ in range(num_sets)]
        theirs = library_int4(n, k, num_sets)
        for m in ROWS:
            late = time.time() - report.start > limit_s
            if f"{k} {n} {m}" in times or late or not report.begin(f"times of {k} -> {n}, {m} rows"):
                continue
            cell = time_cell(lib, torch.randn(m, 1, k, device=DEVICE).bfloat16(), plain, packed, theirs)
            times[f"{k} {n} {m}"] = {"floor": k * n * BYTES_PER_WEIGHT / bandwidth * 1e6, **cell}
        report.save()


def expert_calls(lib: Lib, layer: Experts, dim: int, rows: int, count: int, whole: int) -> tuple[list, float]:
    """Arguments of `count` calls with their own rows and experts, and the mean number of distinct experts."""
    calls, active = [], 0
    for _ in range(count):
        x, weight = torch.randn(rows, dim, device=DEVICE).bfloat16(), torch.rand(rows, TOP_K, device=DEVICE)
        ids = torch.rand(rows, EXPERTS, device=DEVICE).topk(TOP_K).indices.sort().values.int().contiguous()
        if whole:
            args = lib.moe_args(x, layer, ids, weight, torch.empty_like(x, dtype=torch.float32))
            args.whole_width, args.first_segment, args.num_segments = whole, 0, 1
        else:
            args = lib.moe_args(x, layer, ids, weight, torch.empty_like(x), x)
        calls.append(args)
        active += len(ids.unique())
    return calls, active / count


def time_experts(lib: Lib, report: Steps, bandwidth: float, dim: int, width: int, whole: int, limit_s: float) -> None:
    """Routed experts of Kimi K2 dimensions, without the shared one. whole: width is a rank's part, a segment, of it."""
    up, down = random_packed(EXPERTS, 2 * width // 64, dim // 32), random_packed(EXPERTS, dim // 64, width // 32)
    layer = Experts(up, down, None, None, width, 0)
    cells = report.record.setdefault("expert_shares" if whole else "experts", {})
    for rows in (1, 4, 8, 16, 32, 64):
        if time.time() - report.start > limit_s:
            report.say(f"out of time before the experts, width {width}, {rows} rows")
            return
        if not report.begin(f"times of experts, width {width} of {whole or width}, {rows} rows"):
            continue
        calls, active = expert_calls(lib, layer, dim, rows, 4 if rows > 1 else 8, whole)
        num_bytes = active * 3 * dim * width * BYTES_PER_WEIGHT
        cell = {"active": active, "bytes": num_bytes, "floor": num_bytes / bandwidth * 1e6, "up": {}, "down": {}}
        cell["ours"] = graph_us([lambda a=a: lib.moe(a) for a in calls], 8)
        num_rows = lib.rows_per_item(calls[0])
        ups, downs = ([s for s in lib.int4_shapes(p) if s.num_rows == num_rows] for p in (False, True))
        for kind, pairs in (("up", [(s, downs[0]) for s in ups]), ("down", [(ups[0], s) for s in downs])):
            for pair in pairs:
                indices = tuple(s.index for s in pair)
                name = pair[kind == "down"].name
                cell[kind][name] = graph_us([lambda a=a, i=indices: lib.moe_with(a, *i) for a in calls], 8)
        cells[f"{dim} {width} {rows}"] = cell
        report.save()


def table(report: Steps) -> None:
    """Chosen shapes beside their peers, then every shape."""
    print("K N rows | floor | matmul, int4pack_mm | ours, its shape | matmul / ours, int4pack_mm / ours, ours / floor")
    for name, c in report.record.get("times", {}).items():
        pack, ours, early = c.get("int4pack_mm", float("nan")), c["ours"], " early" if c["early"] else ""
        print(
            f"{name:>14} | {c['floor']:5.1f} | {c['matmul']:6.1f} {pack:6.1f} | {ours:6.1f} {c['chosen']}{early} | "
            f"{c['matmul'] / ours:.2f} {pack / ours:.2f} {ours / c['floor']:.2f}"
        )
    cost = [c["ours"] / min(c["shapes"].values()) for c in report.record.get("times", {}).values() if c["shapes"]]
    print("invariance cost, chosen / fastest shape:", ", ".join(f"{c:.2f}" for c in cost))
    by_shape: dict[tuple[int, str], list[str]] = {}
    for name, c in report.record.get("times", {}).items():
        for shape, us in c["shapes"].items():
            by_shape.setdefault((int(name.split()[2]), shape), []).append(f"{us:6.1f}")
    print("us by rows and shape, for K -> N of", *(f"{k}->{n}" for k, n in SHAPES))
    for (rows, shape), cells in by_shape.items():
        print(f"{rows:4} {shape:>18}", *cells)
    print("experts: D I rows | distinct, MB, floor | ours, floor / ours | us by shape of up, of down")
    shares = {f"share {name}": c for name, c in report.record.get("expert_shares", {}).items()}
    for name, c in (report.record.get("experts", {}) | shares).items():
        shapes = "; ".join(", ".join(f"{s} {us:.0f}" for s, us in c[kind].items()) for kind in ("up", "down"))
        print(f"{name:>14} | {c['active']:.0f} {c['bytes'] / 1e6:.0f} {c['floor']:.0f} | {c['ours']:.1f} "
              f"{c['floor'] / c['ours']:.2f} | {shapes}")  # fmt: skip


def time_all(lib: Lib, report: Steps, limit_s: float) -> None:
    """All times, until limit_s after the start."""
    report.announce("bandwidth")
    warm = torch.randn(8192, 8192, device=DEVICE).bfloat16()
    for _ in range(100):
        warm @ warm
    del warm
    bandwidth = report.record["bandwidth"] = copy_bandwidth()
    report.say(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s")
    time_linear(lib, report, bandwidth, limit_s)
    report.say("linear timed")
    for width, whole in ((2048, 0), (256, 2048), (256, 0)):
        time_experts(lib, report, bandwidth, 7168, width, whole, limit_s)
    report.save()
    table(report)
    time_rank(lib, report, bandwidth, limit_s)
    report.save()
    table_of_rank(report)
