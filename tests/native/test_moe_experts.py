"""moe_experts against float64, against the published order of additions, and against itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kdtree_nb import reference
from kdtree_nb.config import segment_bounds
from kdtree_nb.native import ops

pytestmark = pytest.mark.usefixtures("on_device")
BY_VALUE = pytest.mark.cpu_only("a GPU does not look at values: tests/cuda/test_bad_values.py")


class Case:
    """Random weights and a random choice of experts: T rows, D hidden, E experts, k chosen, widths W, S (0: none)."""

    def __init__(self, rng, dtype, T, D, E, k, W, S):
        def make(*shape):
            return torch.from_numpy(rng.standard_normal(shape) / np.sqrt(shape[-1])).to(dtype)

        self.x, self.residual = make(T, D) * D**0.5, make(T, D) * D**0.5
        self.gate, self.up, self.down = make(E, W, D), make(E, W, D), make(E, D, W)
        self.shared = (make(S, D), make(S, D), make(D, S)) if S else (None, None, None)
        chosen = [np.sort(rng.permutation(E)[:k]) for _ in range(T)]
        self.expert_id = torch.from_numpy(np.array(chosen, np.int32).reshape(T, k))
        self.weight = torch.from_numpy(rng.uniform(0.1, 1.0, (T, k)).astype(np.float32))
        self.experts = ops.pack_experts(self.gate, self.up, self.down, *self.shared)

    def run(self, rows=slice(None), residual=True):
        residual = self.residual[rows] if residual else None
        return ops.moe_experts(self.x[rows], self.experts, self.expert_id[rows], self.weight[rows], residual)

    def reference(self, rounding, residual):
        def exactly(tensor):
            return None if tensor is None else tensor.double().numpy()

        gate_up = np.concatenate([exactly(self.gate), exactly(self.up)], axis=1)
        shared = (None, None)
        if self.shared[0] is not None:
            shared = np.concatenate([exactly(self.shared[0]), exactly(self.shared[1])]), exactly(self.shared[2])
        experts = reference.Experts(gate_up, exactly(self.down), *shared)
        return reference.moe_experts(
            exactly(self.x), experts, self.expert_id.numpy(), exactly(self.weight),
            exactly(self.residual) if residual else None, rounding,
        )  # fmt: skip


# T, D, E, k, W, S
CASES = [
    (0, 16, 4, 2, 16, 16), (1, 256, 8, 2, 96, 96), (17, 192, 6, 2, 72, 72), (3, 31, 5, 5, 17, 33), (5, 33, 3, 1, 2, 0),
    (65, 48, 6, 3, 40, 15), (40, 64, 64, 6, 24, 48), (300, 32, 7, 2, 33, 8),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("residual", [False, True])
def test_equals_the_reference(case, residual, rng, dtype, rounding, assert_close):
    c = Case(rng, dtype, *case)
    got, want = c.run(residual=residual), c.reference(rounding, residual)
    largest = np.abs(c.reference(rounding, residual=False)).max(initial=0)
    slack = 0.01 if dtype == torch.bfloat16 else 3e-6  # a BF16 gate or up on the way may round to the other side
    assert_close(got, want, largest * slack / 2e-6, rounded=largest if residual else 0.0)


@pytest.mark.parametrize("case", [(1, 256, 8, 2, 96, 96), (9, 40, 6, 3, 72, 300), (9, 17, 4, 2, 33, 0)])
def test_bits_follow_the_published_order(case, rng, dtype, fma32, device):
    if device.type == "cuda" and dtype == torch.bfloat16:
        pytest.skip("tensor cores add 16 products at once, in an order of their own")
    c = Case(rng, dtype, *case)
    T, D, _, k, _, S = case
    sums = np.zeros((8, T, D), np.float32)

    def add(row, weight, gate, up, down):
        gate_up = ops.linear(c.x[row : row + 1], ops.pack_linear(torch.cat([gate, up])))
        hidden = ops.swiglu(gate_up)[0].float().numpy()
        matrix, bounds = down.float().numpy(), segment_bounds(len(hidden))
        for s in range(8):
            partial = np.zeros(D, np.float32)
            for i in range(bounds[s], bounds[s + 1]):
                partial = fma32(hidden[i], matrix[:, i], partial)
            sums[s, row] = fma32(np.float32(weight), partial, sums[s, row])

    for t in range(T):
        for j in range(k):
            e = int(c.expert_id[t, j])
            add(t, c.weight[t, j], c.gate[e], c.up[e], c.down[e])
        if S:
            add(t, 1.0, *c.shared)
    total = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]))
    want = torch.from_numpy(total).to(dtype)
    assert c.run(residual=False).equal(want)
    assert c.run().equal(ops.residual_add(want, c.residual))


@pytest.mark.parametrize("case", [(65, 256, 8, 2, 96, 96), (300, 48, 6, 3, 72, 20)])
def test_a_row_has_the_same_bits_among_any_rows_and_threads(case, rng, dtype, assert_same_bits, num_threads):
    c = Case(rng, dtype, *case)
    with num_threads(1):
        alone = torch.cat([c.run(slice(t, t + 1)) for t in range(65)])
    for threads in (1, 2):
        with num_threads(threads):
            for count in (2, 3, 7, 17, 33, 64, 65):
                assert_same_bits(c.run(slice(count)), alone[:count])
            assert_same_bits(c.run()[:65], alone)
            assert_same_bits(c.run(slice(61, None))[:4], alone[61:])


def test_experts_that_no_row_chose_are_not_read(rng, dtype, assert_same_bits):
    c = Case(rng, dtype, 3, 32, 6, 2, 24, 0)
    want = c.run()
    unused = [e for e in range(6) if e not in c.expert_id.unique().tolist()]
    assert unused
    c.experts.gate_up[unused], c.experts.down[unused] = float("nan"), float("nan")
    assert_same_bits(c.run(), want)


def test_nan_stays_in_its_row(rng, dtype):
    c = Case(rng, dtype, 5, 32, 3, 2, 24, 16)
    c.x[2, 7] = float("nan")
    assert c.run().isfinite().all(dim=1).tolist() == [True, True, False, True, True]


def test_opcheck(rng, dtype, opcheck):
    for shared in (0, 8):
        c = Case(rng, dtype, 3, 32, 4, 2, 24, shared)
        gate_up, down, shared_gate_up, shared_down, width, shared_width = c.experts[:6]
        opcheck("moe_experts", c.x, gate_up, down, shared_gate_up, shared_down, c.expert_id, c.weight, width,
                shared_width, c.residual)  # fmt: skip


@BY_VALUE
@pytest.mark.parametrize(("index", "value"), [(1, 4), (4, -1)])
def test_an_expert_that_does_not_exist_is_named(index, value, rng):
    c = Case(rng, torch.float32, 3, 32, 4, 2, 24, 8)
    c.expert_id.view(-1)[index] = value
    with pytest.raises(ValueError, match=f"moe_experts: expert_id: expected 0 … 3, got {value} at index {index}"):
        c.run()


def test_bad_input_is_named(rng):
    c = Case(rng, torch.float32, 3, 32, 4, 2, 24, 8)

    def run(**changes):
        arguments = {"x": c.x, "experts": c.experts, "expert_id": c.expert_id, "weight": c.weight} | changes
        return ops.moe_experts(**arguments)

    with pytest.raises(ValueError, match=r"moe_experts: weight: expected shape .*3, 2.*got .*2, 2"):
        run(weight=c.weight[:2])
    with pytest.raises(ValueError, match=r"moe_experts: gate_up: expected shape .*"):
        run(x=torch.zeros(3, 33))
    with pytest.raises(ValueError, match="moe_experts: gate_up: expected dtype BFloat16, got Float"):
        run(x=c.x.bfloat16())
    with pytest.raises(ValueError, match="moe_experts: expected shared_gate_up and shared_down together or neither"):
        run(experts=c.experts._replace(shared_down=None))
    with pytest.raises(ValueError, match="pack_experts: expected shared_gate, shared_up and shared_down together"):
        ops.pack_experts(c.gate, c.up, c.down, c.shared[0])
