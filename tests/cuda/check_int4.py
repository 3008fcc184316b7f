"""Checks of linear and moe_experts with INT4 weights on CUDA: the bits of the BF16 weights they stand for, in every
tile shape and for every number of rows. report.record["checks"] counts them."""

from __future__ import annotations

import sys

import torch
from check_moe_experts import Layer
from linear_lib import DEVICE, ROOT, Experts, Lib, Shape, bits, error, poisoned
from steps import Steps

sys.path.insert(0, str(ROOT))
from kdtree_nb.reference import pack_int4

ROWS = (1, 2, 5, 8, 9, 16, 17, 31, 33, 64, 65, 72, 73, 128, 300)
ALL = 300  # rows of a case
UNIT = 32
BF16_LIMIT = 4e-3  # relative error; one rounding is 1.7e-3


def random_int4(g: int, n: int, k: int, group: int = UNIT) -> tuple[torch.Tensor, torch.Tensor]:
    """Words i32 [G, N, K/8] of random bits and scales bf16 [G, N, K/group] of either sign."""
    words = torch.randint(-(2**31), 2**31, (g, n, k // 8), device=DEVICE, dtype=torch.int64).int()
    return words, (torch.randn(g, n, k // group, device=DEVICE) * 0.2 * k**-0.5).bfloat16()


def dequantize(words: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """bf16 [G, N, K]: value · scale in f32, rounded."""
    value = (words[..., None].long() >> (4 * torch.arange(8, device=words.device)) & 15).flatten(2) - 8
    wide = scale.float().repeat_interleave(value.shape[2] // scale.shape[2], dim=2)
    return (value.float() * wide).bfloat16()


class Case:
    """INT4 weights, 300 rows of x, and what the BF16 weights give for them: `want`, and in FP32 `wide`."""

    def __init__(self, lib: Lib, k: int, n: int, g: int = 1, group: int = UNIT, pad: int = 0) -> None:
        self.name, self.n, self.g, self.k = f"int4 {g} x {k}->{n}, groups of {group}, stride +{pad}", n, g, k
        self.words, self.scale = random_int4(g, n, k, group)
        self.weight = dequantize(self.words, self.scale)
        self.packed, plain = lib.pack_int4(self.words, self.scale), lib.pack(self.weight)
        self.storage = torch.randn(ALL, g, k + pad, device=DEVICE).bfloat16()
        self.x = self.storage[:, :, :k]
        self.want, self.wide = (poisoned(ALL, g, n, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
        lib.linear(self.x, plain, self.want)
        lib.linear(self.x, plain, self.wide)
        self.residual = torch.randn(ALL, g, n, device=DEVICE).bfloat16()

    def rows(self, index: torch.Tensor, kept: int | None = None) -> torch.Tensor:
        """Rows of x; with `kept`, all others are NaN."""
        storage = self.storage[index].clone()
        if kept is not None:
            storage[torch.arange(len(index), device=DEVICE) != kept] = float("nan")
        return storage[:, :, : self.k]


def expect(report: Steps, got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """The same bits."""
    differ = (bits(got) != bits(want)).sum().item()
    report.check(differ == 0, f"{what}: {differ} of {got.numel()} differ")


def check_layout(report: Steps, case: Case) -> None:
    """The packed bytes are the oracle's."""
    scale = case.scale.cpu().view(torch.int16).numpy().view("u2")
    want = torch.from_numpy(pack_int4(case.words.cpu().numpy(), scale))
    differ = (case.packed.cpu() != want).sum().item()
    report.check(differ == 0, f"{case.name}: packed: {differ} bytes differ")


def check_shape(lib: Lib, report: Steps, case: Case, shape: Shape, rows_list) -> None:
    """Any rows, in any order, alone or beside NaN; FP32 sums; nothing is written past the rows."""
    for rows in rows_list:
        index = torch.randperm(ALL, device=DEVICE)[:rows]
        for kept in (None, int(torch.randint(0, rows, ()))):
            out = poisoned(rows + 1, case.g, case.n, dtype=torch.bfloat16)
            lib.linear(case.rows(index, kept), case.packed, out[:rows], shape.index, settled=rows % 2 == 0)
            got, want = (out[:rows], case.want[index]) if kept is None else (out[kept], case.want[index[kept]])
            expect(report, got, want, f"{case.name} {shape.name} rows {rows} kept {kept}")
            past = out[rows].isnan().all().item()
            report.check(past, f"{case.name} {shape.name} rows {rows}: wrote past the rows")
    wide = poisoned(ALL, case.g, case.n, dtype=torch.float32)
    lib.linear(case.x, case.packed, wide, shape.index)
    expect(report, wide, case.wide, f"{case.name} {shape.name} f32")


def check_case(lib: Lib, report: Steps, case: Case, rows_list) -> None:
    """Every tile shape, then linear_cuda's own choice with a residual and a device-side count."""
    relative, largest = error(case.want, torch.einsum("tgk,gnk->tgn", case.x.double(), case.weight.double()))
    report.record.setdefault("error", {})[case.name] = (relative, largest)
    close = relative < BF16_LIMIT and largest < 4 * BF16_LIMIT
    report.check(close, f"{case.name}: error {relative:.2e}, largest {largest:.2e}")
    check_layout(report, case)
    for shape in lib.int4_shapes():
        serves = lib.serves(lib.linear_args(case.x, case.packed, case.want), shape.index)
        if serves and report.begin(case.name, shape.name):
            check_shape(lib, report, case, shape, rows_list)
    names = {shape.index: shape.name for shape in lib.int4_shapes()}
    for rows in (1, 7, 16, 30, 64, 200):
        x, used = case.rows(torch.arange(rows, device=DEVICE)), rows // 2 + 1
        added, partly = (poisoned(rows, case.g, case.n, dtype=torch.bfloat16) for _ in range(2))
        choice = lib.choice(lib.linear_args(x, case.packed, added))[0]
        if choice not in names or not report.begin(f"{case.name} chosen, rows {rows}", names[choice]):
            continue
        lib.linear(x, case.packed, added, residual=case.residual[:rows], settled=True)
        want = (case.want[:rows].float() + case.residual[:rows].float()).bfloat16()
        expect(report, added, want, f"{case.name} residual, rows {rows}")
        count = torch.tensor([used], dtype=torch.int32, device=DEVICE)
        lib.linear(x, case.packed, partly, num_rows_device=count, settled=True)
        expect(report, partly[:used], case.want[:used], f"{case.name} count, rows {rows}")
        past = partly[used:].isnan().all().item()
        report.check(past, f"{case.name}: a row that is not in use was written, rows {rows}")


def check_values(lib: Lib, report: Steps) -> None:
    """Every value times every BF16 scale whose products are finite: what one-hot rows read is dequantize_int4's."""
    report.announce("all values")
    k, n = 256, 8192
    scale = torch.arange(1 << 16, device=DEVICE).reshape(1, n, k // UNIT).to(torch.int32)
    scale = torch.where((scale >> 7 & 255) > 251, 0x3F81, scale).to(torch.int16).view(torch.bfloat16)
    value = (torch.arange(k, device=DEVICE) + torch.arange(n, device=DEVICE)[:, None]) % 16
    words = (value.reshape(1, n, k // 8, 8) << (4 * torch.arange(8, device=DEVICE))).sum(3)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).int().contiguous()
    x = torch.eye(k, device=DEVICE).bfloat16()[:, None].contiguous()
    packed, weight = lib.pack_int4(words, scale), dequantize(words, scale)
    want, got = (poisoned(k, 1, n, dtype=torch.float32) for _ in range(2))
    lib.linear(x, lib.pack(weight), want)
    usual = (scale.view(torch.int16).int() >> 7 & 255).repeat_interleave(UNIT, dim=2) > 8
    reads = torch.equal(want[:, 0].T[usual[0]], weight[0].float()[usual[0]])
    report.check(reads, "one-hot rows do not read the weights")
    for shape in lib.int4_shapes():
        if lib.serves(lib.linear_args(x, packed, got), shape.index) and report.begin("all values", shape.name):
            got.fill_(float("nan"))
            lib.linear(x, packed, got, shape.index)
            expect(report, got, want, f"all values, {shape.name}")


class Int4Layer(Layer):
    """An expert layer, its routed experts INT4; `plain` has the BF16 weights they stand for."""

    def __init__(self, lib: Lib, dim: int, width: int, experts: int, top_k: int, shared: int) -> None:
        super().__init__(lib, torch.bfloat16, dim, width, experts, top_k, shared)
        self.name = f"int4 {self.name}"
        up, down = random_int4(experts, 2 * width, dim), random_int4(experts, dim, width)
        self.plain: Experts = self.packed._replace(gate_up=lib.pack(dequantize(*up)), down=lib.pack(dequantize(*down)))
        self.packed = self.packed._replace(gate_up=lib.pack_int4(*up), down=lib.pack_int4(*down))


def check_layer(lib: Lib, report: Steps, layer: Int4Layer, rows: int) -> None:
    """The bits of the BF16 experts in every pair of shapes; the same for a part of the rows and with a count."""
    report.announce(f"{layer.name} T{rows} in BF16")
    inputs, want = layer.inputs(rows), poisoned(rows, layer.dim, dtype=torch.bfloat16)
    lib.moe(lib.moe_args(inputs[0], layer.plain, *inputs[1:3], want, inputs[3]))
    out = poisoned(rows, layer.dim, dtype=torch.bfloat16)
    args = lib.moe_args(inputs[0], layer.packed, *inputs[1:3], out, inputs[3])
    ups, downs = ([s for s in lib.int4_shapes(p) if s.num_rows == lib.rows_per_item(args)] for p in (False, True))
    pairs = [(up, downs[0]) for up in ups] + [(ups[0], down) for down in downs]
    for up, down in pairs:
        if report.begin(f"{layer.name} T{rows}", up.name, f"segments {down.name}"):
            out.fill_(float("nan"))
            lib.moe_with(args, up.index, down.index)
            expect(report, out, want, f"{layer.name} T{rows}, {up.name} and {down.name}")
    if not report.begin(f"{layer.name} T{rows}", f"chosen for {lib.rows_per_item(args)} rows"):
        return
    expect(report, layer.run(lib, *inputs), want, f"{layer.name} T{rows}")
    index = torch.randperm(rows, device=DEVICE)[: rows // 2 + 1]
    part = layer.run(lib, *(t[index].contiguous() for t in inputs))
    expect(report, part, want[index], f"{layer.name} T{rows}: half of the rows")
    used = rows // 3 + 1
    partly = layer.run(lib, *inputs, count=torch.tensor([used], dtype=torch.int32, device=DEVICE))
    expect(report, partly[:used], want[:used], f"{layer.name} T{rows}: device-side count")


def check_share(lib: Lib, report: Steps, layer: Int4Layer, rows: int, whole: int, first: int, count: int) -> None:
    """Some segments of the width: the part of the sums that BF16 experts leave, in every shape of the down product."""
    x, ids, weight, _ = layer.inputs(rows)

    def share_of(experts: Experts, out: torch.Tensor):
        args = lib.moe_args(x, experts, ids, weight, out)
        args.whole_width, args.whole_shared_width = whole, whole
        args.first_segment, args.num_segments = first, count
        return args

    name = f"{layer.name} T{rows}, segments {first} and on, {count} of 8"
    want, out = (poisoned(rows, layer.dim, dtype=torch.float32) for _ in range(2))
    report.announce(f"{name} in BF16")
    lib.moe(share_of(layer.plain, want))
    args = share_of(layer.packed, out)
    ups, downs = ([s for s in lib.int4_shapes(p) if s.num_rows == lib.rows_per_item(args)] for p in (False, True))
    for down in downs:
        if report.begin(name, ups[0].name, f"segments {down.name}"):
            out.fill_(float("nan"))
            lib.moe_with(args, ups[0].index, down.index)
            expect(report, out, want, f"{name}, {down.name}")
    if report.begin(f"{name}, chosen"):
        out.fill_(float("nan"))
        lib.moe(args)
        expect(report, out, want, name)


def check_int4(lib: Lib, report: Steps, quick: bool) -> None:
    """All cases; `quick`: a few small ones."""
    check_values(lib, report)
    small = ((96, 256), (256, 331), (128, 72, 3, 64, 8), (32, 16), (160, 64, 1, 32, 4), (1408, 200))
    for numbers in small[:3] if quick else (*small, (7168, 512), (2048, 1024)):
        report.announce(f"weights of {numbers}")
        check_case(lib, report, Case(lib, *numbers), (1, 9, 65) if quick else ROWS)
    layers = (
        (256, 64, 8, 2, 96),
        (256, 96, 8, 2, 96),
        (192, 64, 6, 2, 0),
        (2048, 1408, 16, 6, 2816),
        (1024, 512, 64, 8, 0),
    )
    for numbers in layers[:2] if quick else layers:
        report.announce(f"experts of {numbers}")
        layer = Int4Layer(lib, *numbers)
        for rows in (1, 8, 40, 300):
            check_layer(lib, report, layer, rows)
    if not quick:
        layer = Int4Layer(lib, 256, 64, 64, 4, 96)  # at the borders of check_moe_experts.BORDERS
        for rows in (64, 65, 71, 72, 73):
            check_layer(lib, report, layer, rows)
    for width, whole, count in ((256, 2048, 1), (96, 384, 2)):
        report.announce(f"experts of {width} inputs of {whole}")
        layer = Int4Layer(lib, 1024, width, 16, 4, width)
        for rows in (9,) if quick else (1, 9, 40, 300):
            check_share(lib, report, layer, rows, whole, rows % 8 // count * count, count)
