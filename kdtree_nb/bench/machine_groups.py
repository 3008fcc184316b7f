"""What this machine can do, and the share of it that an AR step reaches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kdtree_nb.bench import setting
from kdtree_nb.bench.engine_groups import ar_steps
from kdtree_nb.bench.runner import Effort, Measurement, compete, per_call, rate
from kdtree_nb.model import Model
from kdtree_nb.native import ops

COPY_BYTES = 256 * 2**20
MATMUL_DIM = 1024
_NOT_WEIGHTS = ("cos_sin",)


def bandwidth(effort: Effort) -> list[Measurement]:
    """Bytes per second: a copy in memory (read and written bytes), a read of as many bytes as an AR step's weights
    (`read`: they may fit into a cache), and those weights in the AR step itself. Rates, in the unit byte/s."""
    weights = ar_weight_bytes(setting.model("tiny"))
    source, target = torch.ones(COPY_BYTES // 4), torch.empty(COPY_BYTES // 4)
    small = torch.ones(weights // 4)
    contenders = {
        "copy": per_call(lambda: target.copy_(source)),
        "read": per_call(lambda: torch.sum(small)),
        "AR step": ar_steps("tiny", torch.float32, effort.num_tokens // 2),
    }
    moved = {"copy": 2 * COPY_BYTES, "read": small.numel() * 4, "AR step": weights}
    measured = compete("bandwidth", contenders, effort.num_rounds)
    return [rate(m, moved[m.name.partition("/")[2]], "byte/s", "bytes") for m in measured]


def matmul(effort: Effort) -> list[Measurement]:
    """Floating-point operations per second of torch's square matmul, in FP32 and BF16."""
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (torch.ones(MATMUL_DIM, MATMUL_DIM, dtype=dtype) for _ in range(2))
        name = str(dtype).removeprefix("torch.")
        contenders = {"torch": per_call(lambda a=a, b=b: torch.mm(a, b))}
        measured = compete("matmul", contenders, effort.num_rounds, {"dtype": name, "dim": MATMUL_DIM})
        results += [rate(m, 2 * MATMUL_DIM**3, "flop/s", "flops") for m in measured]
    return results


def ar_weight_bytes(model: Model) -> int:
    """Bytes of the packed weights that a one-row forward reads: everything but the experts that its token is not
    routed to (one token is routed to num_experts_per_tok different ones), and one row of the embedding."""
    row_bytes = model.embedding[0].numel() * model.embedding.element_size()
    parts = [model.norm, model.head]
    for layer in model.layers:
        parts += [*_weights(layer.attention), *_weights(layer.feed_forward)]
    return row_bytes + sum(_num_bytes(part, model.config.num_experts_per_tok) for part in parts)


def _weights(part: Any) -> Iterator[Any]:
    kinds = (torch.Tensor, ops.PackedLinear, ops.PackedExperts)
    return (v for name, v in vars(part).items() if isinstance(v, kinds) and name not in _NOT_WEIGHTS)


def _num_bytes(part: torch.Tensor | ops.PackedLinear | ops.PackedExperts, num_experts: int) -> int:
    if isinstance(part, torch.Tensor):
        return part.numel() * part.element_size()
    if isinstance(part, ops.PackedLinear):
        return _num_bytes(part.data, num_experts)
    routed = sum(_num_bytes(t[:num_experts], 0) for t in (part.gate_up, part.down))
    return routed + sum(_num_bytes(t, 0) for t in (part.shared_gate_up, part.shared_down) if t is not None)
