"""Kimi K2.6 in numbers, from its published dimensions: memory of a rank, work of a step, a record if there is one."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kdtree_nb.hf.config import HfConfig, read_config
from kdtree_nb.hf.plan import Plan, make_plan
from kdtree_nb.hf.step_work import StepWork, expected_experts, rank_config, step_work
from kdtree_nb.viz.records import Measured, Record, Result, number

__all__ = [
    "config", "exchanges_table", "expected_experts", "FOLDER", "gains_table", "Kernel", "kernels", "kernels_table",
    "measured_steps", "plan", "Plan", "projected_from", "Projection", "projections", "rank", "rank_memory",
    "ranks_steps", "ranks_table", "RanksStep", "recorded", "recorded_ranks", "step_work", "StepWork", "told_source",
]  # fmt: skip

FOLDER = Path(__file__).resolve().parents[2] / "data" / "kimi-k2.6"
"""Where config.json with the published dimensions lies."""


@functools.cache
def config() -> HfConfig:
    """The whole model."""
    return read_config(FOLDER)


@functools.cache
def rank(num_ranks: int = 8) -> HfConfig:
    """One of num_ranks tensor-parallel ranks, as a model of its own."""
    return rank_config(config(), num_ranks)


@functools.cache
def plan() -> Plan:
    """What the whole model takes, in BF16 with INT4 experts: what `kdtree-nb plan data/kimi-k2.6` prints."""
    return make_plan(config(), 2)


def rank_memory(num_ranks: int) -> dict[str, float]:
    """Part -> bytes of weights on one of num_ranks ranks."""
    found: dict[str, float] = {}
    for part in plan().parts:
        on_rank = part.num_bytes - part.split_bytes + part.split_bytes / num_ranks
        found[part.name] = found.get(part.name, 0.0) + on_rank
    return found


def recorded(records: Sequence[Record], num_ranks: int = 8) -> Record | None:
    """The first record of one of num_ranks ranks, all layers at true dimensions; None if nobody has run one."""
    model = config().model
    is_whole = {"tp": num_ranks, "layers": model.num_hidden_layers, "hidden": model.hidden_size}
    for record in records:
        steps = (r for r in record.results if r.name == "k26_step/captured")
        if any(is_whole.items() <= r.params.items() for r in steps):
            return record
    return None


def recorded_ranks(records: Sequence[Record], num_ranks: int = 8) -> Record | None:
    """The first record of all num_ranks ranks together, with all layers; None if nobody has run them."""
    model = config().model
    whole = {"tp": num_ranks, "layers": model.num_hidden_layers, "hidden": model.hidden_size}
    for record in records:
        steps = (r for r in record.results if r.name == "k26_tp/step")
        if any(whole.items() <= r.params.items() for r in steps):
            return record
    return None


class Projection(NamedTuple):
    """A step of all ranks, in seconds, and what one rank's record says of it.

    assumed_s:       the record's projection, with an assumed cost of each sum
    with_exchange_s: the record's step (`projected_from`) plus the exchanges of a step as they were measured alone
    """

    rows: int
    prefix_len: int
    measured_s: float
    assumed_s: float
    with_exchange_s: float

    @property
    def assumed_error(self) -> float:
        """Of assumed_s, as a share of what was measured; above 0 where it said too much."""
        return self.assumed_s / self.measured_s - 1

    @property
    def with_exchange_error(self) -> float:
        """Of with_exchange_s."""
        return self.with_exchange_s / self.measured_s - 1


_PLACE = ("tp", "layers", "hidden", "rows", "prefix_len")


def projected_from(one_rank: Iterable[Measured]) -> str:
    """The contender of `k26_step` that projections start from: `share`, or `captured` where the results have none."""
    return "share" if any(r.name == "k26_step/share" for r in one_rank) else "captured"


def told_source(one_rank: Iterable[Measured]) -> str:
    """A line that says what projections start from."""
    if projected_from(one_rank) == "share":
        return "projected from `share`: a rank's own part of every sum, without the exchange"
    return "projected from `captured`, whose products are whole: no `share` has been measured"


def projections(measured: Iterable[Measured], one_rank: Iterable[Measured]) -> list[Projection]:
    """Every step of all ranks, of which one rank's results have the same step of the same share."""

    def medians(results: Iterable[Measured], *names: str) -> list[dict[tuple[Any, ...], float]]:
        results = list(results)
        return [{tuple(number(r, p) for p in _PLACE): r.median for r in results if r.name == name} for name in names]

    one_rank = list(one_rank)
    steps, exchanges = medians(measured, "k26_tp/step", "k26_tp/exchanges alone")
    alone, assumed = medians(one_rank, f"k26_step/{projected_from(one_rank)}", "k26_projection/all ranks")
    places = [place for place in steps if place in exchanges and place in alone and place in assumed]
    return [Projection(*p[-2:], steps[p], assumed[p], alone[p] + exchanges[p]) for p in sorted(places)]


class RanksStep(NamedTuple):
    """A step of all ranks as measured, in seconds: whole, and the part of it that the exchanges take."""

    rows: int
    prefix_len: int
    step_s: float
    exchange_s: float
    num_sums: int

    @property
    def sum_us(self) -> float:
        """Microseconds of one sum over the ranks inside the step."""
        return 1e6 * self.exchange_s / self.num_sums


def ranks_steps(record: Record) -> list[RanksStep]:
    """The steps of a record of all ranks, by rows and prefix."""
    found = []
    for step, alone in record.pairs("k26_tp/step", "k26_tp/without exchange"):
        rows, prefix_len, num_sums = number(step, "rows"), number(step, "prefix_len"), 2 * number(step, "layers")
        found.append(RanksStep(rows, prefix_len, step.median, step.median - alone.median, num_sums))
    return sorted(found)


def ranks_table(whole: Record | None, one_rank: Record | None) -> str:
    """What all eight ranks were measured to take, beside what one rank's record projects; or that nobody ran them."""
    if whole is None:
        return "All eight ranks together: no record yet. What stands above stays a projection."
    projected = {p[:2]: p for p in projections(whole.results, one_rank.results)} if one_rank else {}
    lines = [whole.label, *([told_source(one_rank.results)] if one_rank else [])]
    lines += ["rows   prefix  measured ms  exchanges ms  projected, sums assumed / as measured alone"]
    for s in ranks_steps(whole):
        p = projected.get(s[:2])
        beside = f"{1e3 * p.assumed_s:6.2f} ({p.assumed_error:+.0%}) / " if p else "no record of one rank"
        beside += f"{1e3 * p.with_exchange_s:6.2f} ({p.with_exchange_error:+.0%})" if p else ""
        lines.append(f"{s.rows:4d} {s.prefix_len:8,d} {1e3 * s.step_s:12.2f} {1e3 * s.exchange_s:13.2f}  {beside}")
    for name in ("peak", "card"):
        held = whole.find(f"k26_tp_memory/{name}")
        lines += [f"memory of the fullest card, {name}: {max(held.samples) / 1e9:.1f} GB"] if held else []
    return "\n".join(lines)


def exchanges_table(record: Record) -> str:
    """Steps of a record of several ranks, in milliseconds: whole, with nothing exchanged, and the exchanges alone; and
    whether without exchange the rows were let choose experts of their own. Raises ValueError where there are none."""
    lines = ["rows   prefix    step  without exchange  difference  exchanges alone  samples"]
    pairs = record.pairs("k26_tp/step", "k26_tp/without exchange")
    if not pairs:
        raise ValueError(
            f"exchanges_table: {record.path.name}: expected k26_tp/step and its without exchange, got none"
        )
    for step, silent in sorted(pairs, key=lambda pair: number(pair[0], "rows")):
        rows, prefix_len, count = number(step, "rows"), number(step, "prefix_len"), len(step.samples)
        alone = record.find("k26_tp/exchanges alone", rows=rows, prefix_len=prefix_len)
        if alone is None:
            raise ValueError(
                f"exchanges_table: {record.path.name}: expected k26_tp/exchanges alone of {rows} rows behind "
                f"{prefix_len} tokens, got none. Measure it anew."
            )
        ms = [1e3 * r.median for r in (step, silent, alone)]
        lines.append(
            f"{rows:4d} {prefix_len:8,d} {ms[0]:7.2f} {ms[1]:17.2f} {ms[0] - ms[1]:+11.2f} {ms[2]:16.2f} {count:8d}"
        )
    if not all(step.params.get("same_experts") for step, _ in pairs):
        lines.append("without exchange the rows took other experts, so that a difference is not the exchanges' alone")
    return "\n".join(lines)


def measured_steps(
    record: Record, prefix_len: int, contender: str = "captured", group: str = "k26_step"
) -> Mapping[int, Result]:  # fmt: skip
    """Rows -> the step behind prefix_len tokens, ascending; empty where the record has none."""
    name = f"{group}/{contender}"
    found = [r for r in record.results if r.name == name and number(r, "prefix_len") == prefix_len]
    return {number(r, "rows"): r for r in sorted(found, key=lambda r: number(r, "rows"))}


class Kernel(NamedTuple):
    """All launches of a kernel in one step: of every instance of its template, products told apart by their weights."""

    name: str
    launches: float
    seconds: float

    @property
    def each_us(self) -> float:
        """Microseconds of one launch."""
        return 1e6 * self.seconds / self.launches


def kernels(record: Record | None, rows: int, most: int = 10) -> list[Kernel]:
    """Where a step of `rows` rows went on the device, the longest first; what is beyond the `most` longest is the last,
    as one. Empty where the record has none."""
    sums: dict[str, tuple[float, float]] = {}
    for r in record.results if record else ():
        if r.name.startswith("k26_kernels/") and number(r, "rows") == rows:
            name = _family(r.name.partition("/")[2])
            launches, seconds = sums.get(name, (0.0, 0.0))
            sums[name] = launches + number(r, "launches"), seconds + r.median
    found = sorted((Kernel(name, *of) for name, of in sums.items()), key=lambda k: -k.seconds)
    rest = found[most:]
    if rest:
        found[most:] = [Kernel(f"{len(rest)} others", sum(k.launches for k in rest), sum(k.seconds for k in rest))]
    return found


def _family(name: str) -> str:
    """`f_kernel<TileShape<T, 1, false, 2, true>>` -> `f, INT4`: the last argument of a product's shape that is
    no boolean is its TileKind. Of a pair with different weights both are named."""
    base, _, arguments = name.partition("<")
    weights = []
    for shape in arguments.split("TileShape<")[1:]:
        *_, kind = (word for word in shape.partition(">")[0].split(", ") if word not in ("true", "false"))
        weights.append("floats" if kind == "0" else "INT4")
    told = " and ".join(dict.fromkeys(weights))
    return ", ".join(filter(None, (base.removesuffix("_kernel"), told)))


def kernels_table(record: Record | None, rows: int, most: int = 10) -> str:
    """Launches, microseconds of each, milliseconds and share of the kernels of a step; or that nobody counted them."""
    found = kernels(record, rows, most)
    if record is None or not found:
        return f"{rows} rows: no record by kernel yet"
    layers = next(number(r, "layers") for r in record.results if r.name.startswith("k26_kernels/"))
    together = Kernel("together", sum(k.launches for k in found), sum(k.seconds for k in found))
    lines = [f"{f'rows in the step: {rows}':34s}launches  µs each      ms   share"]
    for k in (*found, together):
        share = k.seconds / together.seconds
        lines.append(f"{k.name[:33]:34s}{k.launches:8.0f} {k.each_us:8.1f} {1e3 * k.seconds:7.2f} {share:7.1%}")
    per_layer = f"{together.launches / layers:.1f} launches, {1e6 * together.seconds / layers:.0f} µs"
    return "\n".join([*lines, f"a layer: {per_layer}"])


def gains_table(one_rank: Record | None, int4: Record | None) -> str:
    """What was tried and what it brought: times without and with it, from the records that there are."""
    tried = []
    layers = one_rank.pairs("k26_layer/floats first", "k26_layer/captured") if one_rank else []
    launches = one_rank.pairs("k26_launch/eager", "k26_launch/captured") if one_rank else []
    for what, pairs in (("a layer: INT4 packed, not made floats", layers), ("a step: captured, not eager", launches)):
        tried += [(what, number(before, "rows"), before.median, after.median) for before, after in pairs]
    products = int4.pairs("int4_linear/torch BF16", "int4_linear/native") if int4 else []
    for num_rows in sorted({number(before, "M") for before, _ in products}):
        of = [(before.median, after.median) for before, after in products if number(before, "M") == num_rows]
        both = [sum(seconds) for seconds in zip(*of, strict=True)]
        tried.append((f"{len(of)} products: INT4, not torch's BF16", num_rows, *both))
    if not tried:
        return "what was tried: no record yet"
    lines = [f"{'':40s}rows  before µs   after µs   times faster"]
    for what, num_rows, before, after in tried:
        lines.append(f"{what:40s}{num_rows:4d} {1e6 * before:10,.0f} {1e6 * after:10,.0f} {before / after:10.2f}")
    return "\n".join(lines)
