"""Forms of moe_route and moe_experts for compute-sanitizer: EXPERT_CASES has one for each way that rows are grouped."""

from __future__ import annotations

from typing import Any

import numpy as np
from sanitize_forms import (
    BF16,
    F32,
    FLOAT,
    INT,
    Forms,
    Out,
    count,
    of_dtypes,
    of_one,
    out,
    packed_int4,
    packed_shape,
    real,
    rng,
)


def moe_route() -> dict[str, Any]:
    return {"logits": real(3, 37, dtype=F32), "bias": real(37, dtype=F32), "expert_id": Out((3, 4), INT),
            "weight": Out((3, 4), FLOAT), "num_rows": 3, "num_experts": 37, "top_k": 4, "scoring": 1,
            "renormalize": True, "scaling_factor": 2.5, "num_groups": 1, "topk_groups": 1}  # fmt: skip


def moe_route_many() -> dict[str, Any]:
    """More experts than a block has threads, more of them chosen than a warp has lanes, by softmax."""
    sizes = {"num_experts": 1100, "top_k": 40, "scoring": 0}
    return {**moe_route(), "logits": real(3, 1100, dtype=F32), "bias": real(1100, dtype=F32),
            "expert_id": Out((3, 40), INT), "weight": Out((3, 40), FLOAT), **sizes}  # fmt: skip


def moe_route_groups() -> dict[str, Any]:
    sizes = {"num_experts": 24, "num_groups": 4, "topk_groups": 2}
    return {**moe_route(), "logits": real(3, 24, dtype=F32), "bias": real(24, dtype=F32), **sizes}


def moe_experts(t: int, rows: int = 9, experts: int = 3, width: int = 20, shared: int = 5) -> dict[str, Any]:
    """Of more rows than a tile has, grouped by a kernel."""
    dim = 34
    expert_id = np.array([sorted(rng.choice(experts, 2, replace=False)) for _ in range(rows)], INT)
    return {"x": real(rows, dim, dtype=t), "gate_up": real(*packed_shape(experts, 2 * width, dim), dtype=t),
            "down": real(*packed_shape(experts, dim, width), dtype=t),
            "shared_gate_up": real(*packed_shape(1, 2 * shared, dim), dtype=t),
            "shared_down": real(*packed_shape(1, dim, shared), dtype=t), "expert_id": expert_id,
            "weight": rng.random((rows, 2), FLOAT), "residual": real(rows, dim, dtype=t),
            "out": out(rows, dim, dtype=t), "num_rows": rows, "dim": dim, "num_experts": experts, "top_k": 2,
            "width": width, "shared_width": shared}  # fmt: skip


def moe_experts_few(t: int) -> dict[str, Any]:
    """So few that each block finds the rows of its expert."""
    return {**moe_experts(t, 5), "num_rows_device": count(5)}


def moe_experts_some(t: int) -> dict[str, Any]:
    """The same with more rows than a tile of few has, the shared expert's in one of 32."""
    return moe_experts(t, 11, 6)


def moe_experts_whole(t: int) -> dict[str, Any]:
    """Widths of whole tiles: where the type is BF16, the up products do swiglu."""
    return moe_experts(t, 5, 3, 48, 16)


def moe_experts_whole_each(t: int) -> dict[str, Any]:
    """The same with an expert for each pair: no block of a cluster ends before the others begin."""
    expert_id = np.arange(8, dtype=INT).reshape(4, 2)
    return {**moe_experts(t, 4, 8, 48, 16), "expert_id": expert_id}


def moe_experts_whole_some(t: int) -> dict[str, Any]:
    """The same with more rows than a tile of few has."""
    return moe_experts(t, 11, 6, 48, 16)


def moe_experts_spread(t: int) -> dict[str, Any]:
    """Few rows of an expert, but many rows."""
    return moe_experts(t, 130, 70)


def moe_experts_share(t: int) -> dict[str, Any]:
    """The second of two ranks: a unit of 32 of each expert's width of 64, and of the shared one's."""
    width = 32
    whole = {name: value for name, value in moe_experts(t).items() if name != "residual"}
    dim, experts, rows = whole["dim"], whole["num_experts"], whole["num_rows"]
    return {**whole, "gate_up": real(*packed_shape(experts, 2 * width, dim), dtype=t),
            "down": real(*packed_shape(experts, dim, width), dtype=t),
            "shared_gate_up": real(*packed_shape(1, 2 * width, dim), dtype=t),
            "shared_down": real(*packed_shape(1, dim, width), dtype=t), "out": out(rows, dim, dtype=F32),
            "width": width, "shared_width": width, "whole_width": 64, "whole_shared_width": 64, "first_segment": 4,
            "num_segments": 4}  # fmt: skip


def experts_int4(rows: int = 9, width: int = 32, shared: int = 5, experts: int = 3) -> dict[str, Any]:
    dim = 96
    return {**moe_experts(BF16, rows, experts), "x": real(rows, dim, dtype=BF16),
            "gate_up": packed_int4(experts, 2 * width, dim),
            "down": packed_int4(experts, dim, width), "residual": real(rows, dim, dtype=BF16), "dtype": BF16,
            "shared_gate_up": real(*packed_shape(1, 2 * shared, dim), dtype=BF16), "dim": dim, "width": width,
            "shared_down": real(*packed_shape(1, dim, shared), dtype=BF16), "out": out(rows, dim, dtype=BF16),
            "int4": True}  # fmt: skip


def experts_int4_few() -> dict[str, Any]:
    return experts_int4(5)


def experts_int4_some() -> dict[str, Any]:
    """More rows than a tile of few has, each expert's in one."""
    return experts_int4(11, experts=6)


def experts_int4_whole() -> dict[str, Any]:
    """Of widths of whole columns: the up products do swiglu."""
    return experts_int4(5, 64, 16)


def experts_int4_whole_some() -> dict[str, Any]:
    """The same with more rows than a tile of few has."""
    return experts_int4(11, 64, 16, 6)


EXPERT_CASES: dict[str, Forms] = {
    "moe_experts": of_dtypes("moe_experts", moe_experts),
    "moe_route": of_one("moe_route", moe_route),
    "moe_route:many": of_one("moe_route", moe_route_many, "many"),
    "moe_route:groups": of_one("moe_route", moe_route_groups, "groups"),
    "moe_experts:share": of_dtypes("moe_experts", moe_experts_share),
    "moe_experts:few": of_dtypes("moe_experts", moe_experts_few),
    "moe_experts:some": of_dtypes("moe_experts", moe_experts_some),
    "moe_experts:whole": of_dtypes("moe_experts", moe_experts_whole),
    "moe_experts:whole each": of_dtypes("moe_experts", moe_experts_whole_each),
    "moe_experts:whole some": of_dtypes("moe_experts", moe_experts_whole_some),
    "moe_experts:spread": of_dtypes("moe_experts", moe_experts_spread),
    "moe_experts:INT4": of_one("moe_experts", experts_int4, "INT4"),
    "moe_experts:INT4 few": of_one("moe_experts", experts_int4_few, "INT4"),
    "moe_experts:INT4 some": of_one("moe_experts", experts_int4_some, "INT4"),
    "moe_experts:INT4 whole": of_one("moe_experts", experts_int4_whole, "INT4"),
    "moe_experts:INT4 whole some": of_one("moe_experts", experts_int4_whole_some, "INT4"),
}
