"""Checks of the CUDA linear: against float64, and the same bits for every number of rows, every tile shape, and beside
rows of NaN. `check_linear(lib, report, quick)` returns the number of checks."""

from __future__ import annotations

import time

import torch
from linear_lib import DEVICE, Lib, Report, bits, error, poisoned

ROWS = (1, 2, 3, 7, 8, 9, 16, 17, 31, 33, 48, 64, 65, 71, 72, 73, 129, 136, 137, 1000)
ALL = 1000  # rows of a case
LIMIT = {torch.bfloat16: 4e-3, torch.float32: 3e-6}  # relative error; BF16: one rounding is 1.7e-3


class Case:
    """Weights [G, N, K] and 1000 rows of x, whose padded group stride may defeat 16-byte copies."""

    def __init__(self, lib: Lib, dtype: torch.dtype, k: int, n: int, g: int = 1, pad: int = 0) -> None:
        self.name = f"{str(dtype)[6:]} {g} x {k}->{n}, stride +{pad}"
        self.dtype, self.n, self.g, self.k = dtype, n, g, k
        self.weight = (torch.randn(g, n, k, device=DEVICE) * k**-0.5).to(dtype)
        self.storage = torch.randn(ALL, g, k + pad, device=DEVICE).to(dtype)
        self.x = self.storage[:, :, :k]
        self.packed = lib.pack(self.weight)
        self.ref = torch.einsum("tgk,gnk->tgn", self.x.double(), self.weight.double())
        self.residual = torch.randn(ALL, g, n, device=DEVICE).to(dtype)

    def rows(self, index: torch.Tensor, kept: int | None = None) -> torch.Tensor:
        """Rows of x; with `kept`, all others are NaN."""
        storage = self.storage[index].clone()
        if kept is not None:
            storage[torch.arange(len(index), device=DEVICE) != kept] = float("nan")
        return storage[:, :, : self.k]

    def out(self, rows: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A poisoned output."""
        return poisoned(rows, self.g, self.n, dtype=dtype or self.dtype)


def check_shape(lib: Lib, report: Report, case: Case, shape, base: torch.Tensor, rows_list) -> int:
    """Any rows, in any order, alone or beside NaN, give the bits of `base`."""
    generator = torch.Generator().manual_seed(time.time_ns() % 2**32)
    for rows in rows_list:
        index = torch.randperm(ALL, generator=generator)[:rows].to(DEVICE)
        for kept in (None, int(torch.randint(0, rows, (1,), generator=generator))):
            out = case.out(rows)
            lib.linear(case.rows(index, kept), case.packed, out, shape.index, settled=rows % 2 == 0)
            got, want = (out, base[index]) if kept is None else (out[kept], base[index[kept]])
            if not torch.equal(bits(got), bits(want)):
                bad = (bits(got) != bits(want)).sum().item()
                report.fail(f"{case.name} {shape.name} rows {rows} kept {kept}: {bad} of {got.numel()} differ")
    return 2 * len(rows_list)


def check_case(lib: Lib, report: Report, case: Case, rows_list) -> int:
    """Every tile shape: close to float64, nothing written past the rows, the bits of the first shape."""
    base, checks = None, 0
    for shape in lib.shapes(case.dtype):
        out = case.out(ALL + 1)
        if not lib.serves(lib.linear_args(case.x, case.packed, out[:ALL]), shape.index):
            continue
        lib.linear(case.x, case.packed, out[:ALL], shape.index)
        relative, largest = error(out[:ALL], case.ref)
        if not (relative < LIMIT[case.dtype] and largest < 4 * LIMIT[case.dtype]):
            report.fail(f"{case.name} {shape.name}: error {relative:.2e}, largest {largest:.2e}")
        if not out[ALL].isnan().all():
            report.fail(f"{case.name} {shape.name}: wrote past the rows")
        if base is None:
            base = out[:ALL].clone()
            report.record.setdefault("error", {})[case.name] = (relative, largest)
        checks += check_shape(lib, report, case, shape, base, rows_list)
    return checks + check_extras(lib, report, case, base)


def check_extras(lib: Lib, report: Report, case: Case, base: torch.Tensor) -> int:
    """Through linear_cuda's own choice: plain, FP32 output, residual, some or none of the rows in use."""
    checks = 0
    for rows in (1, 5, 16, 30, 64, 65, 71, 72, 73, 200):
        x, used = case.rows(torch.arange(rows, device=DEVICE)), rows // 2 + 1
        out, wide, added, partly = case.out(rows), case.out(rows, torch.float32), case.out(rows), case.out(rows)
        lib.linear(x, case.packed, out)
        lib.linear(x, case.packed, wide)
        lib.linear(x, case.packed, added, residual=case.residual[:rows])
        count = torch.tensor([used], dtype=torch.int32, device=DEVICE)
        lib.linear(x, case.packed, partly, num_rows_device=count, settled=True)
        want = {
            "chosen": (out, base[:rows]),
            "f32": (wide.to(case.dtype), base[:rows]),
            "residual": (added, (base[:rows].float() + case.residual[:rows].float()).to(case.dtype)),
            "count": (partly[:used], base[:used]),
        }
        for name, (got, expected) in want.items():
            checks += 1
            if not torch.equal(bits(got), bits(expected)):
                report.fail(f"{case.name} {name}, rows {rows}")
        count.zero_()
        nothing = case.out(rows)
        lib.linear(x, case.packed, nothing, num_rows_device=count, settled=rows % 2 == 0)
        if not (partly[used:].isnan().all() and nothing.isnan().all()):
            report.fail(f"{case.name}: a row that is not in use was written, rows {rows}")
    return checks


def check_chain(lib: Lib, report: Report) -> int:
    """Products that read each other's rows, launched while the one before still runs: the bits of one at a time."""
    case, checks = Case(lib, torch.bfloat16, 2048, 2048), 0
    for rows in (1, 12, 32, 64, 72, 200):
        apart, chained = case.x[:rows].contiguous(), case.x[:rows].contiguous()
        for _ in range(12):
            out = case.out(rows)
            lib.linear(apart, case.packed, out)
            torch.cuda.synchronize()
            apart = out
        outs = [case.out(rows) for _ in range(12)]
        for out in outs:
            lib.linear(chained, case.packed, out, settled=True)
            chained = out
        checks += 1
        if not torch.equal(bits(apart), bits(chained)):
            report.fail(f"chain of 12, rows {rows}")
    return checks


def check_spread(lib: Lib, report: Report) -> int:
    """Values of very different size: the same FP32 bits in every tile shape, so every kind of product adds alike."""
    checks = 0
    for spread in (4, 12, 30):
        x, weight = (
            (torch.randn(d) * torch.randint(-spread, spread + 1, d).float().exp2()).bfloat16().to(DEVICE)
            for d in ((64, 1, 1056), (1, 400, 1056))
        )
        packed, base = lib.pack(weight), None
        for shape in lib.shapes(torch.bfloat16):
            out = poisoned(64, 1, 400, dtype=torch.float32)
            args = lib.linear_args(x, packed, out)
            if lib.serves(args, shape.index):
                lib.run(args, shape.index)
                base, checks = out if base is None else base, checks + 1
                if not (torch.equal(bits(out), bits(base)) and out.isfinite().all()):
                    report.fail(f"{shape.name}: values from 2^-{spread} to 2^{spread}")
    return checks


def check_linear(lib: Lib, report: Report, quick: bool) -> int:
    """All cases; `quick`: a few small ones."""
    total = check_spread(lib, report) + (0 if quick else check_chain(lib, report))
    small = ((2048, 208), (1408, 331), (120, 72), (96, 256), (24, 48, 6, 12), (128, 512, 8, 64), (72, 20, 3, 1))
    for dtype in (torch.bfloat16, torch.float32):
        big = (7168, 1536) if dtype == torch.bfloat16 else (7168, 128)
        for numbers in small[3:6] if quick else (big, *small):
            case = Case(lib, dtype, *numbers)
            report.say(case.name)
            total += check_case(lib, report, case, (1, 9, 65) if quick else ROWS)
    return total
