"""Times of the BF16 products of one rank of eight of Kimi K2.6 (tensor parallel), of few rows: every tile shape by
itself, and products behind the norms and products that they wait for, by whether their weights are read
early. Weights rotate past the L2. Before a shape is timed its bits are compared with those of the first."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from linear_lib import DEVICE, Lib, Shape, bits
from steps import Steps
from timing import graph_time

ROWS = (1, 8, 16)
CACHE_BYTES = 130_000_000
"""Weights of a product that are read before one is read again."""

STARTS = {"waits": False, "early": True}
"""Whether a product waits for the kernel before it, or copies its weights first."""


class Product(NamedTuple):
    """x [rows, groups, K] by weights [groups, N, K]; whole: inputs of all ranks where these are one segment of them."""

    name: str
    k: int
    n: int
    groups: int = 1
    whole: int = 0

    @property
    def num_bytes(self) -> int:
        """Of the weights."""
        return 2 * self.groups * self.n * self.k


LAYER = (
    Product("q_kv_a", 7168, 2112), Product("q_b", 1536, 1536), Product("absorb q", 128, 512, 8),
    Product("absorb v", 512, 128, 8), Product("o", 1024, 7168, whole=8192), Product("router", 7168, 384),
    Product("shared up", 7168, 512), Product("shared down", 256, 7168, whole=2048),
)  # fmt: skip
"""In the order of a step."""

PRODUCTS = (*LAYER, Product("dense up", 7168, 4608), Product("dense down", 2304, 7168, whole=18432))
NORM_BEFORE = ("q_kv_a", "q_b", "router")


class Weights:
    """Random packed weights of a product, and calls on them."""

    def __init__(self, lib: Lib, product: Product, num_sets: int | None = None) -> None:
        self.lib, self.product = lib, product
        if num_sets is None:
            num_sets = max(4, min(64, -(-CACHE_BYTES // product.num_bytes)))
        shape = (product.groups, product.n // 16, product.k // 32, 512)
        make = lambda: torch.empty(shape, device=DEVICE, dtype=torch.bfloat16).normal_(0, product.k**-0.5)  # noqa: E731
        self.packed = [make() for _ in range(num_sets)]

    def args(self, rows: int) -> list:
        """One call a set of weights, on the same rows; each keeps its tensors."""
        p, calls = self.product, []
        dtype = torch.float32 if p.whole else torch.bfloat16
        self.x = torch.randn(rows, p.groups, p.k, device=DEVICE).bfloat16()
        self.out = torch.empty(rows, p.groups, p.n, device=DEVICE, dtype=dtype)
        for packed in self.packed:
            args = self.lib.linear_args(self.x, packed, self.out, settled=True)
            if p.whole:
                args.whole_in, args.first_segment, args.num_segments = p.whole, 0, 1
            calls.append(args)
        return calls


def run_as(lib: Lib, args: ctypes.Structure, shape: int, early: bool) -> None:
    """This shape, weights read early or not."""
    args.weights_settled = early
    lib.run(args, shape)


def graph_us(calls: list[Callable[[], object]], least: int = 24) -> float:
    """Median microseconds of a call."""
    return graph_time(calls * max(1, least // len(calls)), 5) * 1e6


def fits(shape: Shape, rows: int) -> bool:
    """Whether a shape is worth timing for so few rows."""
    return rows <= shape.num_rows <= max(32, 2 * rows)


def library_us(product: Product, rows: int, num_sets: int) -> float:
    """torch's product on weights of its own."""
    weights = [
        torch.empty(product.groups, product.n, product.k, device=DEVICE, dtype=torch.bfloat16).normal_()
        for _ in range(num_sets)
    ]
    x = torch.randn(product.groups, rows, product.k, device=DEVICE).bfloat16()
    if product.groups > 1:
        return graph_us([lambda w=w: torch.bmm(x, w.transpose(1, 2)) for w in weights])
    return graph_us([lambda w=w: torch.mm(x[0], w[0].t()) for w in weights])


def time_shapes(lib: Lib, report: Steps, weights: Weights, rows: int) -> dict[str, float]:
    """Microseconds by shape, each of which waits before it copies."""
    found, calls, want = {}, weights.args(rows), None
    for shape in lib.shapes(torch.bfloat16):
        if not fits(shape, rows) or not lib.serves(calls[0], shape.index):
            continue
        if not report.begin(f"rank's {weights.product.name}, {rows} rows", f"bf16 {shape.name}"):
            continue
        weights.out.fill_(float("nan"))
        lib.run(calls[0], shape.index)
        want = weights.out.clone() if want is None else want
        differ = (bits(weights.out) != bits(want)).sum().item()
        report.check(differ == 0, f"{weights.product.name}, {rows} rows, {shape.name}: {differ} differ")
        found[shape.name] = graph_us([lambda a=a, s=shape: run_as(lib, a, s.index, False) for a in calls])
    return found


def norm_of(lib: Lib, weights: Weights) -> Callable[[], None]:
    """A norm whose result is the product's input; what it reads never changes."""
    x = weights.x.flatten(1)
    args = lib.norm_args(torch.randn_like(x), torch.ones_like(x[0]), x)
    return lambda: lib.norm(args)


def time_starts(lib: Lib, report: Steps, weights: Weights, rows: int, shapes: list[int]) -> dict[str, dict[str, float]]:
    """Microseconds of a product behind a norm, by shape and start, without those of the norm alone."""
    calls, found = weights.args(rows), {}
    norm = norm_of(lib, weights)
    alone = graph_us([norm] * 24)
    names = {shape.index: shape.name for shape in lib.shapes(torch.bfloat16)}
    for index in shapes:
        times = found[names[index]] = {"norm": alone}
        for start, early in STARTS.items():
            step = f"rank's {weights.product.name} behind a norm, {rows} rows, {start}"
            if not report.begin(step, f"bf16 {names[index]}"):
                continue
            run = [f for a in calls for f in (norm, lambda a=a, e=early, i=index: run_as(lib, a, i, e))]
            times[start] = 2 * graph_us(run, 48) - alone
    return found


def names_of(cell: dict) -> dict[str, str]:
    """The chosen shape and the fastest."""
    return {"chosen": cell["chosen"], "fastest": min(cell["shapes"] or [cell["chosen"]], key=cell["shapes"].get)}


def time_product(lib: Lib, report: Steps, product: Product, bandwidth: float) -> None:
    """All cells of a product."""
    weights, cells = Weights(lib, product), report.record.setdefault("rank", {})
    index = {shape.name: shape.index for shape in lib.shapes(torch.bfloat16)}
    for rows in ROWS:
        if f"{product.name}, {rows}" in cells:
            continue
        calls = weights.args(rows)
        choice, early = lib.choice(calls[0])
        chosen = next(name for name, i in index.items() if i == choice)
        report.announce(f"rank's {product.name} as chosen, {rows} rows", (f"bf16 {chosen}",))
        cell = {"floor": product.num_bytes / bandwidth * 1e6, "torch": library_us(product, rows, len(weights.packed))}
        cell |= {"early": early, "chosen": chosen, "ours": graph_us([lambda a=a: lib.run(a) for a in calls])}
        cell["shapes"] = time_shapes(lib, report, weights, rows)
        shapes = sorted({index[name] for name in names_of(cell).values()})
        cell["starts"] = time_starts(lib, report, weights, rows, shapes)
        cells[f"{product.name}, {rows}"] = cell
        report.save()


def time_layer(lib: Lib, report: Steps, rows: int, limit_s: float) -> None:
    """All products of a layer one after the other, by shapes (as chosen, or the fastest alone) and the start of all."""
    layer = [Weights(lib, product, 3) for product in LAYER]
    calls = [weights.args(rows) for weights in layer]
    norms = {w.product.name: norm_of(lib, w) for w in layer if w.product.name in NORM_BEFORE}
    cells, index = report.record.setdefault("rank_layer", {}), {s.name: s.index for s in lib.shapes(torch.bfloat16)}
    for kind in ("chosen", "fastest"):
        names = [names_of(report.record["rank"][f"{w.product.name}, {rows}"])[kind] for w in layer]
        for start, early in STARTS.items():
            step = f"a rank's layer of products, {rows} rows, {kind}, {start}"
            if time.time() - report.start > limit_s or not report.begin(step, *(f"bf16 {name}" for name in names)):
                continue
            run = []
            for number_of_set in range(3):
                for weights, args, name in zip(layer, calls, names, strict=True):
                    run += [norms[weights.product.name]] if weights.product.name in norms else []
                    run.append(lambda a=args[number_of_set], i=index[name], e=early: run_as(lib, a, i, e))
            cells[f"{rows}, {kind}, {start}"] = graph_us(run, 2 * len(run)) * len(run) / 3
            report.save()


def time_rank(lib: Lib, report: Steps, bandwidth: float, limit_s: float) -> None:
    """Fills report.record["rank"] and ["rank_layer"] until limit_s after the start; leaves out what is there."""
    for product in PRODUCTS:
        if f"{product.name}, {ROWS[-1]}" in report.record.get("rank", {}):
            continue
        if time.time() - report.start > limit_s:
            report.say(f"out of time before the rank's {product.name}")
            return
        time_product(lib, report, product, bandwidth)
    for rows in ROWS:
        time_layer(lib, report, rows, limit_s)


def table(report: Steps) -> None:
    """Chosen shapes beside their peers, every shape, every start."""
    rank = report.record.get("rank", {})
    print("a rank's product, rows | floor, torch | ours, its shape | best shape | by start behind a norm")
    for name, cell in rank.items():
        early = " early" if cell["early"] else ""
        best = min(cell["shapes"], key=cell["shapes"].get, default="")
        print(f"{name:>16} | {cell['floor']:5.1f} {cell['torch']:5.1f} | {cell['ours']:5.1f} {cell['chosen']}{early} | "
              f"{cell['shapes'].get(best, float('nan')):5.1f} {best}")  # fmt: skip
        for shape, times in cell.get("starts", {}).items():
            print(f"{'':>18} {shape}:", ", ".join(f"{start} {us:.1f}" for start, us in times.items()))
    for name, cell in rank.items():
        print(f"{name:>16}:", ", ".join(f"{shape} {us:.1f}" for shape, us in cell["shapes"].items()))
    print("a rank's layer of products with three norms, us by rows, shapes and start")
    for name, us in report.record.get("rank_layer", {}).items():
        print(f"{name:>32} {us:7.1f}")
