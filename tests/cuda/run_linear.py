"""Checks and times the CUDA linear and moe_experts on this machine's GPU: `python tests/cuda/run_linear.py`.

Checks: against float64, poisoned outputs, untouched rows; the same bits for every number of rows and every tile shape.
Times: graph replays over rotating weights beside torch.matmul. Writes $OUT/linear.json as it goes, and leaves out what
it already holds.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from linear_lib import Lib

START = time.time()
OUT = Path(os.environ.get("OUT", ".")) / "linear.json"
LIMIT_S = float(os.environ.get("LIMIT_S", "170"))
QUICK = bool(os.environ.get("QUICK"))  # few small checks and no timing, for compute-sanitizer
ROWS = (1, 9, 65) if QUICK else (1, 2, 3, 7, 8, 9, 16, 17, 31, 33, 48, 64, 65, 128, 1000)
TIMED = ((7168, 2048), (2048, 7168), (7168, 1536), (8192, 7168), (7168, 18432), (18432, 7168))
TIMED_ROWS = (1, 4, 8, 16, 17, 32, 64)
BANDWIDTH = 4.24e12
DEV = "cuda"
record: dict = json.loads(OUT.read_text()) if OUT.exists() else {}
failures: list[str] = []


def save() -> None:
    record["failures"] = failures
    OUT.write_text(json.dumps(record))


def fail(text: str) -> None:
    failures.append(text)
    if len(failures) < 30:
        print("FAIL", text, flush=True)


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.int16 if t.dtype == torch.bfloat16 else torch.int32)


def error(out: torch.Tensor, ref: torch.Tensor) -> tuple[float, float]:
    """Relative error by norm, and the largest error over the largest value."""
    diff = out.double() - ref
    return (diff.norm() / ref.norm()).item(), (diff.abs().max() / ref.abs().max()).item()


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=DEV)


# --- linear: correct, and the same bits ------------------------------------------------------------------------------


class Case:
    """Weights [G, N, K] and 1000 rows of x, whose group stride may defeat 16-byte copies."""

    def __init__(self, lib: Lib, dtype: torch.dtype, k: int, n: int, g: int = 1, pad: int = 0) -> None:
        self.name = (
            f"{str(dtype)[6:]} {k}->{n}" + (f" x{g} heads" if g > 1 else "") + (f" stride +{pad}" if pad else "")
        )
        self.dtype, self.n, self.g, self.k = dtype, n, g, k
        self.weight = (torch.randn(g, n, k, device=DEV) * k**-0.5).to(dtype)
        self.storage = torch.randn(1000, g, k + pad, device=DEV).to(dtype)
        self.x = self.storage[:, :, :k]
        self.packed = lib.pack(self.weight)
        self.ref = torch.einsum("tgk,gnk->tgn", self.x.double(), self.weight.double())
        self.residual = torch.randn(1000, g, n, device=DEV).to(dtype)

    def rows(self, index: torch.Tensor, poison_but: int | None = None) -> torch.Tensor:
        storage = self.storage[index].clone()
        if poison_but is not None:
            storage[torch.arange(len(index), device=DEV) != poison_but] = float("nan")
        return storage[:, :, : self.k]


def check_case(lib: Lib, case: Case, generator: torch.Generator) -> int:
    print(case.name, f"t={time.time() - START:.1f}", flush=True)
    limit = 4e-3 if case.dtype == torch.bfloat16 else 3e-6
    base, checks = None, 0
    for shape in lib.shapes(case.dtype):
        out = poisoned(1001, case.g, case.n, dtype=case.dtype)
        lib.linear(case.x, case.packed, out[:1000], shape.index)
        relative, largest = error(out[:1000], case.ref)
        if not (relative < limit and largest < 4 * limit):
            fail(f"{case.name} {shape.name}: error {relative:.2e} {largest:.2e}")
        if not out[1000].isnan().all():
            fail(f"{case.name} {shape.name}: wrote past the rows")
        if base is None:
            base = out[:1000].clone()
            record.setdefault("error", {})[case.name] = (relative, largest)
        for rows in ROWS:
            index = torch.randperm(1000, generator=generator)[:rows].to(DEV)
            for kept in (None, int(torch.randint(0, rows, (1,), generator=generator))):
                out = poisoned(rows, case.g, case.n, dtype=case.dtype)
                lib.linear(case.rows(index, kept), case.packed, out, shape.index, settled=rows % 2 == 0)
                got, want = (out, base[index]) if kept is None else (out[kept], base[index[kept]])
                checks += 1
                if not torch.equal(bits(got), bits(want)):
                    bad = (bits(got) != bits(want)).sum().item()
                    fail(f"{case.name} {shape.name} rows {rows} kept {kept}: {bad} of {got.numel()} differ")
    return checks + check_extras(lib, case, base)


def check_extras(lib: Lib, case: Case, base: torch.Tensor) -> int:
    """Residual, FP32 output, device-side row count, the shape that linear_cuda chooses."""
    checks = 0
    for rows in (1, 5, 16, 30, 64, 200):
        x, index = case.rows(torch.arange(rows, device=DEV)), slice(0, rows)
        out = poisoned(rows, case.g, case.n, dtype=case.dtype)
        lib.linear(x, case.packed, out)
        wide = poisoned(rows, case.g, case.n, dtype=torch.float32)
        lib.linear(x, case.packed, wide)
        added = poisoned(rows, case.g, case.n, dtype=case.dtype)
        lib.linear(x, case.packed, added, residual=case.residual[index])
        partly = poisoned(rows, case.g, case.n, dtype=case.dtype)
        count = torch.tensor([rows // 2 + 1], dtype=torch.int32, device=DEV)
        lib.linear(x, case.packed, partly, num_rows_device=count, settled=True)
        used = rows // 2 + 1
        want = {
            "chosen": (out, base[index]), "f32": (wide.to(case.dtype), base[index]),
            "residual": (added, (base[index].float() + case.residual[index].float()).to(case.dtype)),
            "count": (partly[:used], base[:used]),
        }  # fmt: skip
        for name, (got, expected) in want.items():
            checks += 1
            if not torch.equal(bits(got), bits(expected)):
                fail(f"{case.name} {name} rows {rows}")
        if not partly[used:].isnan().all():
            fail(f"{case.name} count: row out of use written, rows {rows}")
    return checks


def check_linear(lib: Lib) -> None:
    generator = torch.Generator().manual_seed(int(time.time()))
    total = 0
    for dtype in (torch.bfloat16, torch.float32):
        big = (7168, 1536) if dtype == torch.bfloat16 else (7168, 128)
        small = ((2048, 208), (1408, 331), (120, 72), (96, 256), (24, 48, 6, 12), (128, 512, 8, 64), (72, 20, 3, 1))
        for numbers in small[3:6] if QUICK else (big, *small):
            total += check_case(lib, Case(lib, dtype, *numbers), generator)
    print(f"linear: {total} bitwise checks, {len(failures)} failures, t={time.time() - START:.0f} s", flush=True)
    record["linear_checks"] = total


# --- moe_experts -----------------------------------------------------------------------------------------------------


class Moe:
    def __init__(self, lib: Lib, dtype, dim, width, experts, top_k, shared_width) -> None:
        self.name = f"moe {str(dtype)[6:]} D{dim} I{width} E{experts} k{top_k} S{shared_width}"
        self.dtype, self.dim, self.top_k, self.num_experts = dtype, dim, top_k, experts

        def random(*shape: int) -> torch.Tensor:
            return (torch.randn(*shape, device=DEV) * shape[-1] ** -0.5).to(dtype)

        self.gate_up, self.down = random(experts, 2 * width, dim), random(experts, dim, width)
        self.shared = (random(1, 2 * shared_width, dim), random(1, dim, shared_width)) if shared_width else None
        pair = tuple(map(lib.pack, self.shared)) if self.shared else (None, None)
        self.packed = (lib.pack(self.gate_up), lib.pack(self.down), *pair, width, shared_width)

    def inputs(self, rows: int):
        x = torch.randn(rows, self.dim, device=DEV).to(self.dtype)
        score = torch.rand(rows, self.num_experts, device=DEV)
        score[:, 0] += 0.5  # expert 0 is popular: more than one tile of rows
        expert_id = score.topk(self.top_k).indices.sort().values.int().contiguous()
        return (
            x,
            expert_id,
            torch.rand(rows, self.top_k, device=DEV),
            torch.randn(rows, self.dim, device=DEV).to(self.dtype),
        )

    def reference(self, x, expert_id, weight, residual) -> torch.Tensor:
        def expert(x, gate_up, down):
            gate, up = (x.double() @ gate_up.double().T).to(self.dtype).double().chunk(2, 1)
            return (torch.nn.functional.silu(gate) * up).to(self.dtype).double() @ down.double().T

        out = expert(x, *(w[0] for w in self.shared)) if self.shared else torch.zeros_like(x, dtype=torch.float64)
        for e in range(self.num_experts):
            row, k = torch.where(expert_id == e)
            if len(row):
                out.index_add_(0, row, weight[row, k, None].double() * expert(x[row], self.gate_up[e], self.down[e]))
        return out.to(self.dtype).double() + residual.double()

    def run(self, lib: Lib, x, expert_id, weight, residual, count=None) -> torch.Tensor:
        out = poisoned(*x.shape, dtype=self.dtype)
        lib.moe(lib.moe_args(x, self.packed, expert_id, weight, out, residual, count))
        torch.cuda.synchronize()
        return out


def check_moe_case(lib: Lib, moe: Moe, rows: int) -> int:
    inputs = moe.inputs(rows)
    out = moe.run(lib, *inputs)
    relative, largest = error(out, moe.reference(*inputs))
    limit = 6e-3 if moe.dtype == torch.bfloat16 else 6e-6
    record.setdefault("error", {})[f"{moe.name} T{rows}"] = (relative, largest)
    if not (relative < limit and largest < 4 * limit):
        fail(f"{moe.name} T{rows}: error {relative:.2e} {largest:.2e}")
    checks = 0
    for part in (1, 2, 7, 9, 33, 64, 200):
        if part > rows:
            continue
        index = torch.randperm(rows, device=DEV)[:part]
        got = moe.run(lib, *(t[index].contiguous() for t in inputs))
        checks += 1
        if not torch.equal(bits(got), bits(out[index])):
            fail(f"{moe.name}: {part} of {rows} rows differ: {(bits(got) != bits(out[index])).sum().item()}")
    used = rows // 2 + 1
    partly = moe.run(lib, *inputs, count=torch.tensor([used], dtype=torch.int32, device=DEV))
    if not torch.equal(bits(partly[:used]), bits(out[:used])) or not partly[used:].isnan().all():
        fail(f"{moe.name} T{rows}: device-side count")
    return checks + 1


def check_moe_composition(lib: Lib, moe: Moe) -> int:
    """With one expert a row, weight 1 and no shared expert, moe_experts is linear, swiglu, linear, to the bit."""
    x, _, _, residual = moe.inputs(40)
    expert_id = torch.full((40, 1), 1, dtype=torch.int32, device=DEV)
    out = poisoned(40, moe.dim, dtype=moe.dtype)
    packed = (*moe.packed[:2], None, None, moe.packed[4], 0)
    lib.moe(lib.moe_args(x, packed, expert_id, torch.ones(40, 1, device=DEV), out, residual))
    gate_up = poisoned(40, 1, 2 * moe.packed[4], dtype=moe.dtype)
    lib.linear(x[:, None], moe.packed[0][1:2], gate_up)
    gate, up = gate_up[:, 0].float().chunk(2, 1)
    hidden = (gate / (1 + torch.exp(-gate)) * up).to(moe.dtype)
    want = poisoned(40, 1, moe.dim, dtype=moe.dtype)
    lib.linear(hidden[:, None], moe.packed[1][1:2], want, residual=residual[:, None])
    relative, _ = error(out, want[:, 0].double())
    same = (bits(out) == bits(want[:, 0])).float().mean().item()
    record.setdefault("composition", {})[moe.name] = same
    if not (relative < 1e-3 and same > 0.9):  # torch's exp is not ours: a few of the rounded products differ
        fail(f"{moe.name}: composition differs, {relative:.2e}, {same:.4f} of the values have the same bits")
    return 1


def check_moe(lib: Lib) -> None:
    total = 0
    for dtype in (torch.bfloat16, torch.float32):
        tiny = ((256, 96, 8, 2, 96), (192, 72, 6, 2, 72), (34, 20, 3, 3, 5))  # D, width, experts, top_k, shared width
        for numbers in tiny[1:] if QUICK else (*tiny, (2048, 1408, 16, 6, 2816), (1024, 512, 64, 8, 0)):
            moe = Moe(lib, dtype, *numbers)
            print(moe.name, f"t={time.time() - START:.1f}", flush=True)
            for rows in (1, 64) if QUICK else (1, 8, 64, 300):
                total += check_moe_case(lib, moe, rows)
            total += check_moe_composition(lib, moe)
            del moe
    print(f"moe_experts: {total} checks, {len(failures)} failures in all, t={time.time() - START:.0f} s", flush=True)
    record["moe_checks"] = total


# --- time ------------------------------------------------------------------------------------------------------------


def graph_us(calls: list, repeats: int = 3, samples: int = 7) -> float:
    """Median microseconds of a call, from replays of one graph of all calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0](), calls[-1]()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(samples):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / repeats / len(calls))
    return statistics.median(times)


def copies(nbytes: int) -> int:
    """So many weight sets that they do not fit in the cache together."""
    return max(4, -(-330_000_000 // nbytes))


def time_cell(lib: Lib, weights, packed, x) -> dict:
    out = torch.empty(x.shape[0], 1, weights[0].shape[1], device=DEV, dtype=x.dtype)
    flat, view = x[:, 0], out[:, 0]
    cell = {"matmul": graph_us([lambda w=w: torch.matmul(flat, w[0].t(), out=view) for w in weights]), "ours": {}}
    for settled in (False, True):
        args = [lib.linear_args(x, p, out, settled=settled) for p in packed]
        cell["choice"] = lib.choice(args[0])
        for shape in lib.shapes(x.dtype):
            wasteful = shape.num_rows >= 4 * x.shape[0] and shape.num_rows > 16
            if (wasteful or shape.num_rows * 4 <= x.shape[0] < 512) and shape.index != cell["choice"]:
                continue
            if x.shape[0] >= 512 and shape.num_rows < 64:
                continue
            cell["ours"][f"{shape.name}|{int(settled)}"] = graph_us(
                [lambda a=a, s=shape: lib.run(a, s.index) for a in args]
            )
    cell["chosen"] = next(s.name for s in lib.shapes(x.dtype) if s.index == cell["choice"])
    return cell


def time_linear(lib: Lib, dtype: torch.dtype, shapes, rows_list) -> None:
    times = record.setdefault("times", {})
    for k, n in shapes:
        todo = [m for m in rows_list if f"{str(dtype)[6:]} {k} {n} {m}" not in times]
        if not todo:
            continue
        size = k * n * dtype.itemsize
        weights = [(torch.randn(1, n, k, device=DEV) * k**-0.5).to(dtype) for _ in range(copies(size))]
        packed = [lib.pack(w) for w in weights]
        x = torch.randn(max(rows_list), 1, k, device=DEV).to(dtype)
        for m in todo:
            if time.time() - START > LIMIT_S:
                print("out of time before", k, n, m)
                return
            times[f"{str(dtype)[6:]} {k} {n} {m}"] = time_cell(lib, weights, packed, x[:m].contiguous())
        save()


def time_heads(lib: Lib) -> None:
    """Per-head products of absorbed attention, 64 heads, strided x."""
    times = record.setdefault("heads", {})
    for k, n in ((128, 512), (512, 128)):
        weights = [(torch.randn(64, n, k, device=DEV) * k**-0.5).bfloat16() for _ in range(8)]
        packed = [lib.pack(w) for w in weights]
        for m in (1, 16, 64):
            x, out = (torch.randn(m, 64, d, device=DEV).bfloat16() for d in (k, n))
            by_head = x.transpose(0, 1)
            cell = {"bmm": graph_us([lambda w=w, x=by_head: torch.bmm(x, w.transpose(1, 2)) for w in weights])}
            for shape in lib.shapes(torch.bfloat16):
                if shape.num_rows < 4 * max(m, 4):
                    args = [lib.linear_args(x, p, out) for p in packed]
                    cell[shape.name] = graph_us([lambda a=a, s=shape: lib.run(a, s.index) for a in args])
            times[f"{k} {n} {m}"] = cell
            best = sorted((v, s) for s, v in cell.items() if s != "bmm")[:3]
            print(
                f"heads 64 x {k}->{n} rows {m}: bmm {cell['bmm']:.1f}, best", ", ".join(f"{v:.1f} {s}" for v, s in best)
            )


def time_moe(lib: Lib) -> None:
    """One expert layer of Kimi K2 dimensions: 384 experts, 8 of them a row."""
    dim, width, experts, top_k = 7168, 2048, 384, 8

    def packed(groups: int, n: int, k: int) -> torch.Tensor:
        data = torch.empty(groups, n // 16, k // 32, 512, device=DEV, dtype=torch.bfloat16)
        return data.normal_(0, k**-0.5)

    weights = (
        packed(experts, 2 * width, dim),
        packed(experts, dim, width),
        packed(1, 2 * width, dim),
        packed(1, dim, width),
    )
    for rows in (1, 4, 16, 64):
        calls, ids = [], []
        for _ in range(4):
            x = torch.randn(rows, dim, device=DEV).bfloat16()
            expert_id = torch.rand(rows, experts, device=DEV).topk(top_k).indices.sort().values.int().contiguous()
            weight = torch.rand(rows, top_k, device=DEV)
            args = lib.moe_args(x, (*weights, width, width), expert_id, weight, torch.empty_like(x), x)
            ids.append(expert_id)
            calls.append(lambda a=args: lib.moe(a))
        active = sum(len(i.unique()) for i in ids) / 4 + 1
        floor = active * 3 * dim * width * 2 / BANDWIDTH * 1e6
        us = graph_us(calls)
        record.setdefault("moe_times", {})[str(rows)] = {"us": us, "floor_us": floor, "active": active}
        print(
            f"moe K2 dims, {rows} rows, {active:.0f} experts: {us:.0f} us, floor {floor:.0f}, x {us / floor:.2f}",
            flush=True,
        )


def table() -> None:
    print("cell = matmul / chosen / best (best shape); us; settled weights in the last two where faster")
    for name, cell in record.get("times", {}).items():
        dtype, k, n, m = name.split()
        floor = int(k) * int(n) * (2 if dtype == "bfloat16" else 4) / BANDWIDTH * 1e6
        chosen = [cell["ours"][f"{cell['chosen']}|{s}"] for s in (0, 1)]
        order = sorted((us, s) for s, us in cell["ours"].items())
        plain = min((us, s) for s, us in cell["ours"].items() if s.endswith("|0"))
        print(
            f"{dtype[:2]} {k:>5} {n:>5} {m:>4} floor {floor:5.1f} | {cell['matmul']:6.1f} / {chosen[0]:6.1f} "
            f"{chosen[1]:6.1f} / {plain[0]:6.1f} {plain[1][:-2]} / {order[0][0]:6.1f} | "
            f"x{cell['matmul'] / order[0][0]:.2f} | " + ", ".join(f"{us:.1f} {s}" for us, s in order[1:4])
        )


def main() -> int:
    lib = Lib()
    print(torch.cuda.get_device_name(), torch.__version__, f"built t={time.time() - START:.0f} s", flush=True)
    torch.backends.cuda.matmul.allow_tf32 = False
    if "linear_checks" not in record:
        check_linear(lib)
        save()
    if "moe_checks" not in record:
        check_moe(lib)
        save()
    if not QUICK:
        time_all(lib)
        save()
        table()
    print("FAILURES" if failures else "all checks passed", len(failures), f"t={time.time() - START:.0f} s")
    return bool(failures)


def time_all(lib: Lib) -> None:
    warm = torch.randn(8192, 8192, device=DEV).bfloat16()
    for _ in range(100):
        warm @ warm
    del warm
    time_linear(lib, torch.bfloat16, TIMED, TIMED_ROWS)
    time_linear(lib, torch.bfloat16, ((7168, 2048), (7168, 18432)), (128, 1024, 4096))
    time_heads(lib)
    time_linear(lib, torch.float32, ((7168, 2048), (7168, 7168)), (1, 16, 64, 1024))
    if time.time() - START < LIMIT_S:
        time_moe(lib)


if __name__ == "__main__":
    sys.exit(main())
