"""Benchmark of one expert layer of Kimi K2 dimensions on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kdtree_nb.bench.lab import Calls, Lab
from kdtree_nb.bench.runner import Effort, Measurement, require
from kdtree_nb.native import ops

DIM, WIDTH, NUM_EXPERTS, TOP_K = 7168, 2048, 384, 8
ROWS = (1, 4, 8, 16, 17, 33, 65, 256)
INDEXED_ROWS = 4
"""Most rows for which the peer that copies each row's experts is measured: it copies 88 MB for each."""

NUM_INPUTS = 4
"""Inputs in turn, routed to different experts."""

CHECKED_EXPERTS = 16
DTYPE = torch.bfloat16


class Plain:
    """Weights as torch wants them: gate_up [E, 2I, D], down [E, D, I], and those of the shared expert, E = 1."""

    def __init__(self, gate_up: Tensor, down: Tensor, shared_gate_up: Tensor, shared_down: Tensor) -> None:
        self.gate_up, self.down, self.shared_gate_up, self.shared_down = gate_up, down, shared_gate_up, shared_down

    def shared(self, x: Tensor) -> Tensor:
        """The shared expert of x [T, D], f32 [T, D]."""
        return functional.linear(_swiglu(functional.linear(x, self.shared_gate_up[0])), self.shared_down[0]).float()


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate) * up


def grouped(plain: Plain, x: Tensor, expert_id: Tensor, weight: Tensor) -> Tensor:
    """Rows sorted by expert, torch's grouped matmul, and the weighted sum of each row's experts."""
    T, top_k = expert_id.shape
    ordered, place = expert_id.flatten().sort()
    experts = torch.arange(plain.gate_up.shape[0], device=x.device, dtype=ordered.dtype)
    ends = torch.searchsorted(ordered, experts, right=True, out_int32=True)
    hidden = _swiglu(torch._grouped_mm(x[place // top_k], plain.gate_up.transpose(1, 2), offs=ends))
    out = torch._grouped_mm(hidden, plain.down.transpose(1, 2), offs=ends)
    back = torch.empty_like(place).scatter_(0, place, torch.arange(T * top_k, device=x.device))
    routed = (out[back].view(T, top_k, -1).float() * weight[..., None]).sum(1)
    return x + (routed + plain.shared(x)).to(x.dtype)


def indexed(plain: Plain, x: Tensor, expert_id: Tensor, weight: Tensor) -> Tensor:
    """The weights of each row's experts are copied, and multiplied by torch.bmm."""
    T, top_k = expert_id.shape
    chosen = expert_id.flatten().long()
    rows = x.repeat_interleave(top_k, 0)[..., None]
    hidden = _swiglu(torch.bmm(plain.gate_up[chosen], rows)[..., 0])
    out = torch.bmm(plain.down[chosen], hidden[..., None]).view(T, top_k, -1)
    return x + ((out.float() * weight[..., None]).sum(1) + plain.shared(x)).to(x.dtype)


def moe_experts(lab: Lab, effort: Effort) -> list[Measurement]:
    """One expert layer of Kimi K2 dimensions in BF16 with random routing. Contenders: torch's grouped matmul, torch.bmm
    over copied weights (for few rows), and the native operation. Bytes: the weights of the
    experts that were chosen, each once."""
    _check(lab)
    plain, packed = _weights(lab)
    results = []
    for T in effort.some(ROWS):
        inputs = [_input(lab, T, NUM_EXPERTS) for _ in range(NUM_INPUTS)]
        contenders: dict[str, Calls] = {
            "torch grouped": [lambda i=i: grouped(plain, *i) for i in inputs],
            "native": [lambda i=i: ops.moe_experts(i[0], packed, i[1], i[2], i[0]) for i in inputs],
        }
        if T <= INDEXED_ROWS:
            contenders["torch indexed"] = [lambda i=i: indexed(plain, *i) for i in inputs]
        results += lab.compete("moe_experts", contenders, effort, _params(lab, T, inputs))
    return results


def _params(lab: Lab, T: int, inputs: list[tuple[Tensor, Tensor, Tensor]]) -> dict[str, object]:
    active = sum(len(expert_id.unique()) for _, expert_id, _ in inputs) / len(inputs)
    one = 3 * DIM * WIDTH
    work = lab.work((active + 1) * one * DTYPE.itemsize, 2 * T * (TOP_K + 1) * one, DTYPE)
    return {"rows": T, "experts": NUM_EXPERTS, "top_k": TOP_K, "active_experts": active} | work


def _input(lab: Lab, T: int, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, expert ids ascending and their weights, drawn at random for each row."""
    score = torch.rand(T, num_experts, device=lab.device)
    expert_id = score.topk(TOP_K).indices.sort().values.int().contiguous()
    return lab.randn(T, DIM, dtype=DTYPE), expert_id, torch.rand(T, TOP_K, device=lab.device)


def _weights(lab: Lab) -> tuple[Plain, ops.PackedExperts]:
    """Random weights in one memory, read as plain ones and as packed ones: as many bytes, not the same matrices."""
    packed = ops.PackedExperts(
        *(_packed(lab, E, N, K) for E in (NUM_EXPERTS, 1) for N, K in ((2 * WIDTH, DIM), (DIM, WIDTH))), WIDTH, WIDTH
    )
    plain = Plain(
        packed.gate_up.view(NUM_EXPERTS, 2 * WIDTH, DIM), packed.down.view(NUM_EXPERTS, DIM, WIDTH),
        packed.shared_gate_up.view(1, 2 * WIDTH, DIM), packed.shared_down.view(1, DIM, WIDTH),
    )  # fmt: skip
    return plain, packed


def _packed(lab: Lab, E: int, N: int, K: int) -> Tensor:
    """Random packed weights of E matrices [N, K], made without the plain ones, which would not fit beside them."""
    shape = ops.pack_linear(torch.zeros(1, N, K, device=lab.device, dtype=DTYPE)).data.shape[1:]
    return lab.randn(E, *shape, dtype=DTYPE).mul_(K**-0.5)


def _check(lab: Lab) -> None:
    """The three agree on a layer of fewer experts."""
    E = CHECKED_EXPERTS
    gate_up, down = lab.randn(E, 2 * WIDTH, DIM, dtype=DTYPE), lab.randn(E, DIM, WIDTH, dtype=DTYPE)
    shared = [lab.randn(1, 2 * WIDTH, DIM, dtype=DTYPE), lab.randn(1, DIM, WIDTH, dtype=DTYPE)]
    for weight in (gate_up, down, *shared):
        weight.mul_(weight.shape[-1] ** -0.5)
    plain = Plain(gate_up, down, *shared)
    experts = ops.pack_experts(*gate_up.chunk(2, 1), down, *shared[0][0].chunk(2), shared[1][0])
    x, expert_id, weight = _input(lab, 9, E)
    native = ops.moe_experts(x, experts, expert_id, weight, x)
    for peer in (grouped, indexed):
        error = (peer(plain, x, expert_id, weight) - native).abs().max() / native.abs().max()
        require(bool(error <= 2e-2), "moe_experts", f"the output ({peer.__name__}) to 2 % of the largest value")
