"""pack_int4 against numpy, and what CUDA's kernels do with it: which values a lane finds, and how they become BF16.

Products with packed INT4 weights have the bits of those with the BF16 weights that dequantize_int4 makes.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kdtree_nb import reference
from kdtree_nb.native import ops
from tests.native.test_dequantize_int4 import random_int4, values_of

pytestmark = pytest.mark.usefixtures("on_device")
SHAPES = [(1, 1, 32, 32), (2, 70, 64, 32), (3, 64, 192, 64), (1, 130, 96, 96), (2, 16, 0, 32), (0, 5, 32, 32)]


def random_packed(rng, *shape):
    weight, scale = random_int4(rng, *shape)
    sign = torch.from_numpy(rng.choice([-1.0, 1.0], scale.shape).astype(np.float32))
    return weight, (scale * sign).bfloat16()


def bits_of(scale):
    return scale.cpu().view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[2]])
def test_equals_the_reference(shape, rng):
    weight, scale = random_packed(rng, *shape)
    got = ops.pack_int4(weight, scale)
    want = reference.pack_int4(weight.cpu().numpy(), bits_of(scale))
    assert got.dtype == torch.uint8 and np.array_equal(got.cpu().numpy(), want)


def lane_matrices(block: np.ndarray) -> np.ndarray:
    """Values + 8 [half 2, 16 outputs, 16 inputs] of a block of 288 bytes, as the lanes of a warp find them.

    The A matrix of a product m16n8k16: lane l holds, of rows l // 4 and l // 4 + 8, the columns 2 (l % 4) and the next,
    then both rows' columns 8 further on. The four pairs of a word stand 4 bits apart, the values of a pair 16 bits.
    """
    words = block[:256].view("<u4").reshape(32, 2)
    out = np.full((2, 16, 16), -1)
    for lane in range(32):
        row, column = lane // 4, 2 * (lane % 4)
        for half in range(2):
            places = ((row, column), (row + 8, column), (row, column + 8), (row + 8, column + 8))
            for pair, (r, c) in enumerate(places):
                shifted = int(words[lane, half]) >> (4 * pair)
                out[half, r, c], out[half, r, c + 1] = shifted & 15, shifted >> 16 & 15
    return out


def test_a_lane_finds_its_values(rng):
    weight, scale = random_packed(rng, 1, 128, 96, 32)
    packed = ops.pack_int4(weight, scale).cpu().numpy()
    value = reference.dequantize_int4(weight.cpu().numpy(), np.ones(scale.shape))[0] + 8
    for tile in range(8):
        for unit in range(3):
            block = packed[0, tile // 4, unit, tile % 4]
            want = value[tile * 16 : tile * 16 + 16, unit * 32 : unit * 32 + 32]
            assert np.array_equal(lane_matrices(block), want.reshape(16, 2, 16).transpose(1, 0, 2))
            scales = block[256:].view("<u2").reshape(8, 2)  # of a lane's two rows, one word
            assert np.array_equal(scales.T.reshape(16), bits_of(scale)[0, tile * 16 : tile * 16 + 16, unit])


def test_the_bits_of_128_and_a_digit_are_a_bf16():
    """In integers: what the kernels take from 128 + value + 8 before they multiply, for all values and scales."""
    digit = np.arange(16, dtype=np.uint32)
    wide = (digit | 0x4300) << 16  # the upper half of an FP32
    value = wide.view(np.float32) - np.float32(136)
    assert value.tolist() == list(range(-8, 8))
    assert np.uint32(0x4308 << 16).view(np.float32) == 136
    scale = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    scale = scale[np.isfinite(scale)]
    with np.errstate(over="ignore"):
        exact = value[:, None].astype(np.float64) * scale
        in_f32 = value[:, None] * scale
    # The product is exact in FP32 unless it overflows, so that rounding it once more to BF16 rounds once.
    finite = np.isfinite(in_f32)
    assert np.array_equal(in_f32[finite].astype(np.float64), exact[finite]) and finite.mean() > 0.98


@pytest.mark.parametrize("group", [32, 64])
def test_products_have_the_bits_of_the_values(group, rng, assert_same_bits):
    weight, scale = random_packed(rng, 1, 77, 192, group)
    packed = ops.packed_int4_linear(weight[0], scale[0])
    plain = ops.pack_linear(values_of(weight, scale.float(), torch.bfloat16)[0])
    residual = torch.from_numpy(rng.standard_normal((65, 77)).astype(np.float32)).bfloat16()
    for num_rows in (1, 17, 65):
        x = torch.from_numpy(rng.standard_normal((num_rows, 192)).astype(np.float32)).bfloat16()
        assert_same_bits(ops.linear(x, packed), ops.linear(x, plain))
        assert_same_bits(ops.linear(x, packed, out_f32=True), ops.linear(x, plain, out_f32=True))
        assert_same_bits(ops.linear(x, packed, residual[:num_rows]), ops.linear(x, plain, residual[:num_rows]))
    used = torch.tensor([3], dtype=torch.int32)
    assert_same_bits(ops.linear(x, packed, num_rows=used)[:3], ops.linear(x, plain)[:3])


def test_heads_have_the_bits_of_the_values(rng, assert_same_bits):
    weight, scale = random_packed(rng, 3, 40, 64, 32)
    packed, plain = (
        ops.packed_int4_linear(weight, scale),
        ops.pack_linear(values_of(weight, scale.float(), torch.bfloat16)),
    )
    x = torch.from_numpy(rng.standard_normal((9, 3, 64)).astype(np.float32)).bfloat16()
    assert_same_bits(ops.linear_heads(x, packed), ops.linear_heads(x, plain))


@pytest.mark.parametrize("shared", [False, True])
def test_experts_have_the_bits_of_their_values(shared, rng, assert_same_bits):
    E, D, width, top_k = 7, 64, 96, 2
    up, down = random_packed(rng, E, 2 * width, D, 32), random_packed(rng, E, D, width, 32)
    gate_values, up_values = values_of(up[0], up[1].float(), torch.bfloat16).chunk(2, dim=1)
    parts = [
        torch.from_numpy(rng.standard_normal(s).astype(np.float32)).bfloat16() for s in ((40, D), (40, D), (D, 40))
    ]
    plain = ops.pack_experts(
        gate_values.contiguous(), up_values.contiguous(), values_of(down[0], down[1].float(), torch.bfloat16),
        *(parts if shared else ()),
    )  # fmt: skip
    packed = plain._replace(gate_up=ops.pack_int4(*up), down=ops.pack_int4(*down))
    for num_rows in (1, 5, 40):
        x = torch.from_numpy(rng.standard_normal((num_rows, D)).astype(np.float32)).bfloat16()
        ids = np.sort(np.stack([rng.permutation(E)[:top_k] for _ in range(num_rows)]), axis=1).astype(np.int32)
        arguments = (torch.from_numpy(ids), torch.from_numpy(rng.random((num_rows, top_k)).astype(np.float32)), x)
        assert_same_bits(ops.moe_experts(x, packed, *arguments), ops.moe_experts(x, plain, *arguments))


def test_opcheck(opcheck, rng):
    weight, scale = random_packed(rng, 2, 70, 64, 32)
    opcheck("pack_int4", weight, scale)
    packed = ops.packed_int4_linear(weight[0], scale[0])
    opcheck("linear", torch.zeros(3, 64, dtype=torch.bfloat16), packed.data, 70, None, False)


@pytest.mark.parametrize(
    ("weight", "scale", "message"),
    [
        (
            torch.zeros(1, 4, 4, dtype=torch.int32),
            torch.zeros(1, 4, 2).bfloat16(),
            "scale: expected groups of a multiple",
        ),
        (torch.zeros(1, 4, 4, dtype=torch.int32), torch.zeros(1, 4, 1), "scale: expected dtype"),
        (torch.zeros(1, 4, 4, dtype=torch.int32), torch.zeros(1, 3, 1).bfloat16(), "scale: expected shape"),
        (torch.zeros(4, 4, dtype=torch.int32), torch.zeros(4, 1).bfloat16(), "weight: expected"),
    ],
)
def test_bad_input(weight, scale, message):
    with pytest.raises(ValueError, match=f"pack_int4: {message}"):
        ops.pack_int4(weight, scale)


def test_bad_products(rng):
    weight, scale = random_packed(rng, 1, 70, 64, 32)
    packed = ops.packed_int4_linear(weight, scale)
    with pytest.raises(ValueError, match="linear: packed: expected INT4 weights with BFloat16 rows"):
        ops.linear(torch.zeros(2, 64), packed)
    with pytest.raises(ValueError, match="linear: packed: expected"):
        ops.linear(torch.zeros(2, 96).bfloat16(), packed)
    with pytest.raises(ValueError, match=r"pack_int4: expected groups of a multiple of 32 inputs, got 2 of 32"):
        reference.pack_int4(np.zeros((1, 1, 4), np.int32), np.zeros((1, 1, 2), np.uint16))
    plain = ops.pack_linear(torch.zeros(1, 64, 96).bfloat16()).data
    experts = ops.PackedExperts(ops.pack_int4(*random_packed(rng, 1, 192, 64, 32)), plain, None, None, 96, 0)
    ids, x = torch.zeros(2, 1, dtype=torch.int32), torch.zeros(2, 64).bfloat16()
    with pytest.raises(ValueError, match="moe_experts: down: expected weights of the type of gate_up"):
        ops.moe_experts(x, experts, ids, torch.ones(2, 1))
