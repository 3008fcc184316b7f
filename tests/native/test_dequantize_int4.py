"""dequantize_int4 against numpy; products with INT4 weights have the bits of those with the values they stand for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kdtree_nb import reference
from kdtree_nb.native import ops

pytestmark = pytest.mark.usefixtures("on_device")
SHAPES = [(1, 1, 8, 8), (2, 17, 96, 32), (3, 16, 64, 64), (1, 33, 40, 8), (4, 160, 224, 32)]


def random_int4(rng, G, N, K, group):
    weight = torch.from_numpy(rng.integers(-(2**31), 2**31, (G, N, K // 8)).astype(np.int32))
    scale = torch.from_numpy(rng.uniform(0.01, 0.1, (G, N, K // group)).astype(np.float32))
    return weight, scale


def values_of(weight, scale, dtype):
    value = reference.dequantize_int4(weight.cpu().numpy(), scale.double().cpu().numpy())
    return torch.from_numpy(value.astype(np.float32)).to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_equals_the_packed_values(shape, dtype, scale_dtype, rng, assert_same_bits):
    weight, scale = random_int4(rng, *shape)
    scale = scale.to(scale_dtype)
    got = ops.dequantize_int4(weight, scale, dtype == torch.bfloat16)
    assert_same_bits(got, ops.pack_linear(values_of(weight, scale.float(), dtype).to(got.device)).data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_have_the_bits_of_the_values(dtype, rng, assert_same_bits):
    weight, scale = random_int4(rng, 1, 45, 96, 32)
    packed = ops.int4_linear(weight[0], scale[0].bfloat16())
    plain = ops.pack_linear(values_of(weight, scale.bfloat16().float(), dtype)[0])
    for num_rows in (1, 17, 65):
        x = torch.from_numpy(rng.standard_normal((num_rows, 96)).astype(np.float32)).to(dtype)
        assert_same_bits(ops.linear(x, packed), ops.linear(x, plain))
        assert_same_bits(ops.linear(x[:1].contiguous(), packed), ops.linear(x, packed)[:1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_have_the_bits_of_their_values(dtype, rng, assert_same_bits):
    E, D, width, top_k = 7, 64, 96, 2
    gate_up, gate_up_scale = random_int4(rng, E, 2 * width, D, 32)
    down, down_scale = random_int4(rng, E, D, width, 32)
    int4 = ops.PackedExperts(gate_up, down, None, None, width, 0, gate_up_scale, down_scale)
    gate, up = values_of(gate_up, gate_up_scale, dtype).chunk(2, dim=1)
    plain = ops.pack_experts(gate.contiguous(), up.contiguous(), values_of(down, down_scale, dtype))
    for num_rows in (1, 5, 40):
        x = torch.from_numpy(rng.standard_normal((num_rows, D)).astype(np.float32)).to(dtype)
        expert_id = torch.from_numpy(
            np.sort(np.stack([rng.permutation(E)[:top_k] for _ in range(num_rows)]), axis=1).astype(np.int32)
        )
        weight = torch.from_numpy(rng.uniform(0, 1, (num_rows, top_k)).astype(np.float32))
        assert_same_bits(
            ops.moe_experts(x, int4, expert_id, weight), ops.moe_experts(x, plain, expert_id, weight)
        )  # fmt: skip


def test_only_wanted_groups_are_written(rng, assert_same_bits):
    weight, scale = random_int4(rng, 5, 16, 32, 32)
    ids = torch.tensor([[3, 1], [0, 9], [4, 4]], dtype=torch.int32)
    every = ops.dequantize_int4(weight, scale, False)
    some = ops.dequantize_int4(weight, scale, False, ids, torch.tensor([2], dtype=torch.int32))
    for group in (0, 1, 3):
        assert_same_bits(some[group], every[group])


def test_opcheck(opcheck, rng):
    weight, scale = random_int4(rng, 2, 17, 64, 32)
    opcheck("dequantize_int4", weight, scale, True)
    opcheck("dequantize_int4", weight, scale, False, None, None)


@pytest.mark.parametrize(
    ("weight", "scale", "message"),
    [
        (torch.zeros(1, 4, 4, dtype=torch.int32), torch.zeros(1, 4, 3), "scale: expected groups"),
        (torch.zeros(1, 4, 4, dtype=torch.int32), torch.zeros(1, 4, 0), "scale: expected groups"),
        (torch.zeros(1, 4, 4, dtype=torch.int32), torch.zeros(1, 3, 1), "scale: expected shape"),
        (torch.zeros(1, 4, 4), torch.zeros(1, 4, 1), "weight: expected dtype"),
        (torch.zeros(4, 4, dtype=torch.int32), torch.zeros(4, 1), "weight: expected"),
        (torch.zeros(1, 4, 4, dtype=torch.int32), torch.zeros(1, 4, 1, dtype=torch.float64), "scale: expected"),
    ],
)
def test_bad_input(weight, scale, message):
    with pytest.raises(ValueError, match=f"dequantize_int4: {message}"):
        ops.dequantize_int4(weight, scale, False)
