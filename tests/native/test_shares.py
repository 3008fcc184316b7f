"""A rank's part of linear and moe_experts, and add_partials: together they have the bits of one rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kdtree_nb import reference
from kdtree_nb.config import share_of_rank
from kdtree_nb.native import ops

pytestmark = pytest.mark.usefixtures("on_device")

RANKS = [1, 2, 4, 8]


def shares(length: int, num_ranks: int) -> list[slice]:
    return [slice(*share_of_rank(length, rank, num_ranks)) for rank in range(num_ranks)]


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize(
    "shape", [(1, 40, 16), (3, 48, 96), (17, 33, 100), (60, 20, 1000), (5, 17, 1408), (200, 64, 256)]
)
def test_parts_of_linear_add_up_to_linear(shape, num_ranks, normal, assert_same_bits, dtype):
    T, N, K = shape
    x, weight, residual = normal(T, K), normal(N, K), normal(T, N)
    x[0], weight[0] = -x[0].abs() * 1e-38, weight[0].abs() * 1e-10  # sums that underflow to -0
    packed = ops.pack_linear(weight)
    parts = []
    for rank, part in enumerate(shares(K, num_ranks)):
        mine = ops.pack_linear(weight[:, part].contiguous())
        parts.append(ops.linear_partial(x[:, part], mine, K, ops.Segments.of_rank(rank, num_ranks)))
    parts = torch.stack(parts)
    assert_same_bits(ops.add_partials(parts, dtype, residual), ops.linear(x, packed, residual))
    assert_same_bits(ops.add_partials(parts, torch.float32), ops.linear(x, packed, out_f32=True))


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("widths", [(16, 256), (96, 96), (128, 0), (1408, 64), (40, 24)])
def test_parts_of_experts_add_up_to_experts(widths, num_ranks, normal, assert_same_bits, dtype):
    T, D, E, k = 33, 64, 5, 2
    width, S = widths
    gate, up, down = normal(E, width, D), normal(E, width, D), normal(E, D, width)
    shared = (normal(S, D), normal(S, D), normal(D, S)) if S else ()
    x, residual, weight = normal(T, D), normal(T, D), normal(T, k).float().abs()
    chosen = [torch.randperm(E, generator=torch.Generator().manual_seed(t))[:k].sort().values for t in range(T)]
    expert_id = torch.stack(chosen).int().to(x.device)
    want = ops.moe_experts(x, ops.pack_experts(gate, up, down, *shared), expert_id, weight, residual)
    parts = []
    for rank, (a, b) in enumerate(zip(shares(width, num_ranks), shares(S, num_ranks), strict=True)):
        mine = [shared[0][b], shared[1][b], shared[2][:, b].contiguous()] if S else []
        experts = ops.pack_experts(gate[:, a], up[:, a], down[:, :, a].contiguous(), *mine)
        segments = ops.Segments.of_rank(rank, num_ranks)
        parts.append(ops.moe_experts_partial(x, experts, expert_id, weight, width, S, segments))
    assert_same_bits(ops.add_partials(torch.stack(parts), dtype, residual), want)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_add_partials_equals_the_reference(num_ranks, exactly, assert_close, rounding, device, dtype, normal):
    partials = torch.randn(num_ranks, 7, 45, generator=torch.Generator().manual_seed(1)).to(device)
    residual = normal(7, 45)
    bound = partials.abs().sum(0).cpu().double().numpy()
    total = reference.add_partials(exactly(partials))
    assert_close(ops.add_partials(partials, dtype), rounding(total), bound)
    want = reference.add_partials(exactly(partials), exactly(residual), rounding)
    assert_close(ops.add_partials(partials, dtype, residual), want, bound, rounded=total)


def test_add_partials_takes_pairs(device):
    parts = torch.tensor([1.0, 2.0**-24, -1.0, 2.0**-24, 3.0, -3.0, 2.0**-30, 1.0]).view(8, 1, 1).to(device)
    p = parts.flatten().cpu().numpy()
    want = ((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + (p[6] + p[7]))
    assert ops.add_partials(parts, torch.float32).item() == want != np.float32(p.sum(dtype=np.float64))


def test_rows_not_in_use_are_left_alone(normal, assert_same_bits, dtype, device):
    partials = torch.randn(2, 9, 40).to(device)
    used = torch.tensor([5], dtype=torch.int32, device=device)
    got = ops.add_partials(partials, dtype, None, used)[:5]
    assert_same_bits(got, ops.add_partials(partials[:, :5].contiguous(), dtype))


def test_wrong_shares_are_refused(normal):
    x, packed = normal(3, 64), ops.pack_linear(normal(20, 64))
    with pytest.raises(ValueError, match="linear: whole_in: expected segments 0 … 3 of 256 elements.*got 64"):
        ops.linear_partial(x, packed, 256, ops.Segments(0, 4))
    with pytest.raises(ValueError, match="a node of the tree"):
        ops.linear_partial(x, packed, 256, ops.Segments(1, 2))
    with pytest.raises(ValueError, match="add_partials: partials: expected those of 1, 2, 4 or 8 ranks, got 3"):
        ops.add_partials(torch.zeros(3, 2, 4, device=x.device), torch.float32)


def test_opcheck(normal, opcheck, device):
    packed = ops.pack_linear(normal(20, 32))
    opcheck("linear", normal(3, 32), packed.data, 20, None, True, None, False, 64, 0, 4)
    opcheck("add_partials", torch.zeros(2, 3, 20, device=device), normal(3, 20), normal(1).dtype == torch.bfloat16)
    gate_up, down = ops.pack_linear(normal(4, 64, 40)), ops.pack_linear(normal(4, 40, 32))
    ids, weight = torch.zeros(3, 2, dtype=torch.int32, device=device), torch.ones(3, 2, device=device)
    opcheck(
        "moe_experts", normal(3, 40), gate_up.data, down.data, None, None, ids, weight, 32, 0, None, None, 64, 0, 4, 4
    )
