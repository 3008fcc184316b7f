"""linear and linear_heads against float64, against the published order of additions, and against themselves."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from kdtree_nb import reference
from kdtree_nb.config import segment_bounds
from kdtree_nb.native import ops

pytestmark = pytest.mark.usefixtures("on_device")

# (rows, outputs, inputs): none, one, odd, around vectors of 16, units of 32 and register tiles
SHAPES = [
    (0, 16, 32), (1, 1, 1), (1, 512, 256), (17, 33, 31), (2, 15, 33), (5, 31, 63), (7, 65, 64), (6, 64, 65),
    (3, 17, 255), (12, 16, 257), (65, 80, 96), (33, 331, 192), (49, 48, 320), (97, 5, 40), (4, 200, 1000),
]  # fmt: skip


def product_bound(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return np.abs(x) @ np.abs(weight).T


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_reference(shape, normal, exactly, assert_close, rounding):
    T, N, K = shape
    x, weight, residual = normal(T, K), normal(N, K), normal(T, N)
    packed = ops.pack_linear(weight)
    bound = product_bound(exactly(x), exactly(weight))
    product = exactly(x) @ exactly(weight).T
    assert_close(ops.linear(x, packed, out_f32=True), product, bound)
    assert_close(ops.linear(x, packed), reference.linear(exactly(x), exactly(weight), rounding=rounding), bound)
    with_residual = reference.linear(exactly(x), exactly(weight), exactly(residual), rounding)
    assert_close(ops.linear(x, packed, residual), with_residual, bound, rounded=product)


def test_residual_is_added_after_the_rounding(normal, assert_same_bits):
    x, weight, residual = normal(9, 70), normal(40, 70), normal(9, 40)
    packed = ops.pack_linear(weight)
    assert_same_bits(ops.linear(x, packed, residual), ops.residual_add(ops.linear(x, packed), residual))


def test_bf16_result_is_the_rounded_f32_result(assert_same_bits, rng):
    x = torch.from_numpy(rng.standard_normal((9, 70))).bfloat16()
    packed = ops.pack_linear(torch.from_numpy(rng.standard_normal((40, 70))).bfloat16())
    assert_same_bits(ops.linear(x, packed), ops.linear(x, packed, out_f32=True).bfloat16())


@pytest.mark.parametrize("K", [1, 31, 32, 33, 64, 255, 256, 257, 520])
def test_bits_follow_the_published_order(K, normal, fma32, device, dtype):
    if device.type == "cuda" and dtype == torch.bfloat16:
        pytest.skip("tensor cores add 16 products at once, in an order of their own")
    x, weight = normal(3, K), normal(18, K)
    X, W = x.float().numpy(), weight.float().numpy()
    bounds = segment_bounds(K)
    sums = []
    for begin, end in zip(bounds, bounds[1:], strict=False):
        total = np.zeros((3, 18), np.float32)
        for k in range(begin, end):
            total = fma32(X[:, k, None], W[None, :, k], total)
        sums.append(total)
    s = sums
    want = ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]))
    got = ops.linear(x, ops.pack_linear(weight), out_f32=True).numpy()
    assert np.array_equal(got.view(np.int32), want.view(np.int32))


def test_fma32_is_the_exact_fused_operation(fma32, rng):
    a, b = rng.standard_normal((2, 300)).astype(np.float32)
    c = (-a * b * (1 + rng.integers(-2, 3, 300) * 2.0**-24)).astype(np.float32)  # near cancellation and near ties
    for x, y, z, got in zip(a, b, c, fma32(a, b, c), strict=True):
        error = abs(Fraction(float(got)) - (Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))))
        assert error <= Fraction(float(np.spacing(np.abs(got)))) / 2


@pytest.mark.parametrize("shape", [(65, 512, 256), (65, 100, 70), (65, 16, 2048)])
def test_a_row_has_the_same_bits_among_any_rows_and_threads(shape, normal, assert_same_bits, num_threads):
    T, N, K = shape
    x, residual, packed = normal(T, K), normal(T, N), ops.pack_linear(normal(N, K))
    with num_threads(1):
        alone = torch.cat([ops.linear(x[t : t + 1], packed, residual[t : t + 1]) for t in range(T)])
    for threads in (1, 2):
        with num_threads(threads):
            for count in (2, 3, 4, 5, 6, 7, 13, 17, 33, 48, 49, 65):
                assert_same_bits(ops.linear(x[:count], packed, residual[:count]), alone[:count])
            assert_same_bits(ops.linear(x[60:], packed, residual[60:]), alone[60:])


def test_strided_rows_are_read_in_place(normal, assert_same_bits):
    wide, packed = normal(5, 300), ops.pack_linear(normal(20, 64))
    view = wide[:, 100:164]
    assert_same_bits(ops.linear(view, packed), ops.linear(view.contiguous(), packed))


@pytest.mark.parametrize("shape", [(1, 4, 64, 32), (17, 6, 48, 24), (3, 2, 20, 48), (66, 3, 17, 65), (0, 2, 16, 16)])
def test_heads_equal_one_linear_per_head(shape, normal, exactly, assert_close, assert_same_bits, rounding):
    T, G, N, K = shape
    x, weight = normal(G, T, K).transpose(0, 1), normal(G, N, K)
    got = ops.linear_heads(x, ops.pack_linear(weight))
    want = reference.linear_heads(exactly(x), exactly(weight), rounding)
    assert_close(got, want, np.einsum("tgk,gnk->tgn", np.abs(exactly(x)), np.abs(exactly(weight))))
    for g in range(G):
        assert_same_bits(got[:, g].contiguous(), ops.linear(x[:, g], ops.pack_linear(weight[g])))


@pytest.mark.cpu_only("the layout of the CPU")
def test_pack_linear_lays_16_outputs_side_by_side(normal):
    weight = normal(2, 19, 5)
    packed = ops.pack_linear(weight)
    assert (packed.num_groups, packed.num_out, packed.num_in) == (2, 19, 5)
    assert packed.data.shape == (2, 2, 5, 16)
    for g, n in [(0, 0), (0, 15), (1, 16), (1, 18)]:
        assert packed.data[g, n // 16, :, n % 16].equal(weight[g, n])
    assert packed.data[:, 1, :, 3:].eq(0).all()


def test_a_gpu_may_read_packed_weights_early(device, normal, assert_same_bits):
    packed = ops.pack_linear(normal(300, 520))
    assert packed.settled == (device.type == "cuda")
    for T in (1, 20, 64):
        x = normal(T, 520)
        assert_same_bits(ops.linear(x, packed), ops.linear(x, packed._replace(settled=False)))


def test_infinities_and_nan_stay_in_their_row_and_column(normal):
    x, weight = normal(4, 40), normal(20, 40)
    x[1, 3], weight[7, 5] = float("nan"), float("inf")
    finite = ops.linear(x, ops.pack_linear(weight)).isfinite()
    expected = torch.ones(4, 20, dtype=torch.bool)
    expected[1], expected[:, 7] = False, False
    assert finite.equal(expected)


def test_opcheck(normal, opcheck):
    packed = ops.pack_linear(normal(20, 40))
    opcheck("linear", normal(3, 40), packed.data, 20, normal(3, 20), False)
    opcheck("linear", normal(3, 40), packed.data, 20, None, True, None, packed.settled)
    opcheck("pack_linear", normal(2, 20, 40))
    opcheck("linear_heads", normal(3, 2, 40), ops.pack_linear(normal(2, 20, 40)).data, 20)


@pytest.mark.parametrize(
    ("x", "residual", "out_f32", "message"),
    [
        (torch.zeros(3, 41), None, False, r"linear: packed: expected shape .*41.*got .*40"),
        (torch.zeros(40), None, False, r"linear: x: expected 2 dimensions"),
        (torch.zeros(3, 40).double(), None, False, r"linear: x: expected dtype Float or BFloat16, got Double"),
        (torch.zeros(3, 40).bfloat16(), None, False, r"linear: packed: expected dtype BFloat16, got Float"),
        (torch.zeros(40, 3).T, None, False, r"linear: x: expected stride 1"),
        (torch.zeros(3, 40), torch.zeros(3, 21), False, r"linear: residual: expected shape .*3, 20.*got .*3, 21"),
    ],
)
def test_bad_input_is_named(x, residual, out_f32, message):
    packed = ops.pack_linear(torch.zeros(20, 40))
    with pytest.raises(ValueError, match=message):
        ops.linear(x, packed, residual, out_f32)


def test_f32_result_of_bf16_takes_no_residual():
    packed = ops.pack_linear(torch.zeros(20, 40).bfloat16())
    with pytest.raises(ValueError, match="linear: residual: expected none"):
        ops.linear(torch.zeros(3, 40).bfloat16(), packed, torch.zeros(3, 20).bfloat16(), out_f32=True)


@pytest.mark.parametrize("num_out", [-1, -40, 2**63 - 1])
def test_impossible_numbers_of_outputs(num_out):
    packed = ops.pack_linear(torch.zeros(20, 40))._replace(num_out=num_out)
    with pytest.raises(ValueError, match=f"linear: num_out: expected 0 … .*, got {num_out}"):
        ops.linear(torch.zeros(3, 40), packed)
    with pytest.raises(ValueError, match=f"linear_heads: num_out: expected 0 … .*, got {num_out}"):
        ops.linear_heads(torch.zeros(3, 1, 40), packed)
