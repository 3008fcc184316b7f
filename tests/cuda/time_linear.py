"""Times of the CUDA linear and moe_experts by graph replays over rotating weights, beside torch.matmul and the floor of
reading the weights once."""

from __future__ import annotations

import time

import torch
from linear_lib import DEVICE, Experts, Lib, Report
from timing import graph_time

SHAPES = ((7168, 2048), (2048, 7168), (7168, 1536), (8192, 7168), (7168, 18432), (18432, 7168))  # K, N
ROWS = (1, 4, 8, 16, 17, 32, 64, 128, 512, 2048)
ROWS_OF_ALL = (16, 32, 64, 128)  # where every tile shape is timed, beside the one that linear_cuda chooses
BANDWIDTH = 4.24e12  # bytes/s, a copy on an H200


def graph_us(calls: list) -> float:
    """Median microseconds of a call."""
    return graph_time(calls * max(1, 24 // len(calls))) * 1e6


def fits(num_rows: int, rows: int) -> bool:
    """Whether a tile of num_rows is worth timing: not mostly empty, not many tiles."""
    return num_rows <= max(64, 2 * rows) and num_rows * 2 >= rows


def time_cell(lib: Lib, weights: list, packed: list, x: torch.Tensor) -> dict:
    """Microseconds of torch.matmul, of linear_cuda with weights settled or not, and of every fitting shape, settled."""
    out = torch.empty(x.shape[0], 1, weights[0].shape[1], device=DEVICE, dtype=x.dtype)
    flat, view = x[:, 0], out[:, 0]
    cell = {"matmul": graph_us([lambda w=w: torch.matmul(flat, w[0].t(), out=view) for w in weights]), "shapes": {}}
    for name, settled in (("unsettled", False), ("ours", True)):
        args = [lib.linear_args(x, p, out, settled=settled) for p in packed]
        cell[name] = graph_us([lambda a=a: lib.run(a) for a in args])
    choice, cell["early"] = lib.choice(args[0])
    cell["chosen"] = lib.shapes(x.dtype)[choice].name
    cell["shapes"][cell["chosen"]] = cell["ours"]
    for shape in lib.shapes(x.dtype) if x.shape[0] in ROWS_OF_ALL else ():
        if fits(shape.num_rows, x.shape[0]) and lib.serves(args[0], shape.index) and shape.index != choice:
            cell["shapes"][shape.name] = graph_us([lambda a=a, s=shape: lib.run(a, s.index) for a in args])
    return cell


def time_shapes(lib: Lib, report: Report, dtype: torch.dtype, shapes, rows_list, limit_s: float) -> None:
    """Fills report.record["times"]; leaves out what is there already."""
    times = report.record.setdefault("times", {})
    for k, n in shapes:
        todo = [m for m in rows_list if f"{str(dtype)[6:]} {k} {n} {m}" not in times]
        if not todo:
            continue
        num_sets = max(4, -(-330_000_000 // (k * n * dtype.itemsize)))  # more than the cache holds
        weights = [(torch.randn(1, n, k, device=DEVICE) * k**-0.5).to(dtype) for _ in range(num_sets)]
        packed = [lib.pack(w) for w in weights]
        x = torch.randn(max(rows_list), 1, k, device=DEVICE).to(dtype)
        for m in todo:
            if time.time() - report.start > limit_s:
                report.say(f"out of time before {k} {n} {m}")
                return
            times[f"{str(dtype)[6:]} {k} {n} {m}"] = time_cell(lib, weights, packed, x[:m].contiguous())
        report.save()


def time_heads(lib: Lib, report: Report) -> None:
    """Per-head products of absorbed attention, 64 heads, beside torch.bmm."""
    for k, n in ((128, 512), (512, 128)):
        weights = [(torch.randn(64, n, k, device=DEVICE) * k**-0.5).bfloat16() for _ in range(8)]
        packed = [lib.pack(w) for w in weights]
        for m in (1, 16, 64):
            x, out = (torch.randn(m, 64, d, device=DEVICE).bfloat16() for d in (k, n))
            by_head = x.transpose(0, 1)
            bmm = graph_us([lambda w=w, x=by_head: torch.bmm(x, w.transpose(1, 2)) for w in weights])
            args = [lib.linear_args(x, p, out, settled=True) for p in packed]
            ours = graph_us([lambda a=a: lib.run(a) for a in args])
            report.record.setdefault("heads", {})[f"{k} {n} {m}"] = {"bmm": bmm, "ours": ours}
            report.say(f"heads 64 x {k}->{n}, rows {m}: bmm {bmm:.1f} us, ours {ours:.1f}")


def time_moe(lib: Lib, report: Report) -> None:
    """One expert layer of Kimi K2 dimensions: 384 experts, 8 of them a row, and a shared one."""
    dim, width, experts, top_k = 7168, 2048, 384, 8

    def packed(groups: int, n: int, k: int) -> torch.Tensor:
        data = torch.empty(groups, n // 16, k // 32, 512, device=DEVICE, dtype=torch.bfloat16)
        return data.normal_(0, k**-0.5)

    weights = [packed(e, *numbers) for e in (experts, 1) for numbers in ((2 * width, dim), (dim, width))]
    layer = Experts(*weights, width, width)
    for rows in (1, 4, 16, 64):
        calls, active = [], 1.0
        for _ in range(4):
            x, weight = torch.randn(rows, dim, device=DEVICE).bfloat16(), torch.rand(rows, top_k, device=DEVICE)
            ids = torch.rand(rows, experts, device=DEVICE).topk(top_k).indices.sort().values.int().contiguous()
            args = lib.moe_args(x, layer, ids, weight, torch.empty_like(x), x)
            active += len(ids.unique()) / 4
            calls.append(lambda a=args: lib.moe(a))
        floor, us = active * 3 * dim * width * 2 / BANDWIDTH * 1e6, graph_us(calls)
        report.record.setdefault("moe_times", {})[str(rows)] = {"us": us, "floor_us": floor, "active": active}
        report.say(f"moe K2 dims, {rows} rows, {active:.0f} experts: {us:.0f} us, {us / floor:.2f} x floor")


def table(report: Report) -> None:
    """One line a cell."""
    print("us: floor | matmul | unsettled | linear_cuda, its shape | best shape | matmul / ours, of unsettled weights")
    for name, cell in report.record.get("times", {}).items():
        dtype, k, n, m = name.split()
        floor = int(k) * int(n) * (2 if dtype == "bfloat16" else 4) / BANDWIDTH * 1e6
        best, shape = min((us, s) for s, us in cell["shapes"].items())
        ours = f"{cell['unsettled']:6.1f} | {cell['ours']:6.1f} {cell['chosen']}{' early' if cell['early'] else ''}"
        print(
            f"{dtype[:2]} {k:>5} {n:>5} {m:>4} | {floor:5.1f} | {cell['matmul']:6.1f} | {ours} | {best:6.1f} {shape} | "
            f"{cell['matmul'] / cell['ours']:.2f} {cell['matmul'] / cell['unsettled']:.2f}"
        )


def time_all(lib: Lib, report: Report, limit_s: float) -> None:
    """All times, until limit_s after the start."""
    warm = torch.randn(8192, 8192, device=DEVICE).bfloat16()
    for _ in range(100):
        warm @ warm
    del warm
    time_shapes(lib, report, torch.bfloat16, SHAPES, ROWS, limit_s)
    time_shapes(lib, report, torch.bfloat16, ((7168, 18432),), (8192,), limit_s)
    time_heads(lib, report)
    time_shapes(lib, report, torch.float32, ((7168, 2048), (7168, 7168)), (1, 16, 64, 1024), limit_s)
    if time.time() - report.start < limit_s:
        time_moe(lib, report)
    report.save()
    table(report)
