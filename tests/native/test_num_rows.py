"""Rows past num_rows are not read, not written, and change no bit of the rows in use. For every row-wise operation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch

from kdtree_nb import ops, reference
from kdtree_nb.native.ops.namespace import native

T = 7
COUNTS = [0, 1, 4, 7, 99, -1]
POISON = 2**30


@dataclasses.dataclass
class Call:
    """`operator(*per_row, *others)`, with the arguments in the operator's order by `order`."""

    operator: str
    per_row: list[torch.Tensor]
    others: list = dataclasses.field(default_factory=list)
    order: Callable = lambda rows, others: [*rows, *others]

    def run(self, rows, num_rows=None):
        result = getattr(native, self.operator)(*self.order(rows, self.others), num_rows)
        return result if isinstance(result, tuple) else (result,)


class Inputs:
    """Random inputs of T rows on a device."""

    def __init__(self, rng, dtype, device):
        self.rng, self.dtype, self.device = rng, dtype, device

    def normal(self, *shape, dtype=None):
        return torch.from_numpy(self.rng.standard_normal(shape)).to(self.device, dtype or self.dtype)

    def ids(self, high, *shape):
        return torch.from_numpy(self.rng.integers(0, high, shape)).to(self.device)

    def experts(self):
        routed = [self.normal(4, 8, 32), self.normal(4, 8, 32), self.normal(4, 32, 8)]
        return ops.pack_experts(*routed, self.normal(6, 32), self.normal(6, 32), self.normal(32, 6))


def moe_experts(i: Inputs) -> Call:
    gate_up, down, shared_gate_up, shared_down, width, shared_width = i.experts()[:6]
    order = lambda rows, others: [rows[0], *others[:4], *rows[1:3], *others[4:], rows[3]]  # noqa: E731
    id_ = torch.tensor([[0, 3], [1, 2], [2, 3], [0, 1], [1, 3], [0, 2], [2, 3]], dtype=torch.int32, device=i.device)
    rows = [i.normal(T, 32), id_, i.normal(T, 2, dtype=torch.float32), i.normal(T, 32)]
    return Call("moe_experts", rows, [gate_up, down, shared_gate_up, shared_down, width, shared_width], order)


def verify_attn(i: Inputs) -> Call:
    """Stream 0: a root and its child; stream 1: a root, two children and a grandchild of each."""
    stream = torch.tensor([0, 0, 1, 1, 1, 1, 1], dtype=torch.int32, device=i.device)
    node = torch.tensor([0, 1, 0, 1, 2, 3, 4], dtype=torch.int32, device=i.device)
    parent = torch.tensor([[-1, 0, -1, -1, -1], [-1, 0, 0, 1, 2]], dtype=torch.int32, device=i.device)
    depth = torch.tensor([[0, 1, -1, -1, -1], [0, 1, 1, 2, 2]], dtype=torch.int32, device=i.device)
    prefix_len = torch.tensor([3, 70], dtype=torch.int32, device=i.device)
    order = lambda rows, others: [*rows[:2], others[0], *rows[2:], *others[1:]]  # noqa: E731
    rows = [i.normal(T, 2, 16), i.normal(T, 2, 8), stream, node]
    return Call("verify_attn", rows, [i.normal(2, 90, 24), parent, depth, prefix_len, 0.2], order)


def sample(i: Inputs) -> Call:
    """Stream 0 draws from 3 tokens, stream 1 from all."""
    columns = (([0.7, 1.0], torch.float32), ([3, 0], torch.int32), ([0.9, 1.0], torch.float32), ([5, 6], torch.int64))
    parameters = [torch.tensor(values, dtype=dtype, device=i.device) for values, dtype in columns]
    return Call("sample", [i.normal(T, 50, dtype=torch.float32), i.ids(2, T).int(), i.ids(99, T).int()], parameters)


OTHERS_FIRST = lambda rows, others: [*others, *rows]  # noqa: E731
CALLS = {
    "embed": lambda i: Call("embed", [i.ids(11, T)], [i.normal(11, 5)], OTHERS_FIRST),
    "rms_norm": lambda i: Call("rms_norm", [i.normal(T, 33)], [i.normal(33), 1e-6]),
    "linear": lambda i: Call(
        "linear", [i.normal(T, 33), i.normal(T, 20)], [ops.pack_linear(i.normal(20, 33)).data, 20, False],
        lambda rows, others: [rows[0], *others[:2], rows[1], others[2]],
    ),
    "linear_heads": lambda i: Call("linear_heads", [i.normal(T, 3, 16)], [ops.pack_linear(i.normal(3, 9, 16)).data, 9]),
    "rope": lambda i: Call(
        "rope", [i.normal(T, 3, 16), i.ids(9, T).int()], [i.normal(9, 16, dtype=torch.float32)],
        lambda rows, others: [rows[0], *others, rows[1]],
    ),
    "absorb_query": lambda i: Call(
        "absorb_query", [i.normal(T, 3 * (16 + 8)), i.ids(9, T).int()],
        [ops.pack_linear(i.normal(3, 9, 16)).data, 3, 9, i.normal(9, 8, dtype=torch.float32)],
        lambda rows, others: [rows[0], *others, rows[1]],
    ),
    "swiglu": lambda i: Call("swiglu", [i.normal(T, 34)]),
    "residual_add": lambda i: Call("residual_add", [i.normal(T, 33), i.normal(T, 33)]),
    "argmax": lambda i: Call("argmax", [i.normal(T, 50, dtype=torch.float32)]),
    "sample": sample,
    "moe_route": lambda i: Call("moe_route", [i.normal(T, 6, dtype=torch.float32)], [None, 2, 0, True, 1.5]),
    "moe_experts": moe_experts,
    "verify_attn": verify_attn,
}  # fmt: skip


@pytest.fixture
def inputs(rng, dtype, device):
    return Inputs(rng, dtype, device)


def spoiled(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """A copy whose rows from `count` on nobody may read."""
    copy = tensor.clone()
    copy[count:] = torch.nan if copy.is_floating_point() else POISON
    return copy


def counted(count: int, device) -> torch.Tensor:
    return torch.tensor([count], dtype=torch.int32, device=device)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", CALLS)
def test_rows_in_use_have_the_bits_of_a_call_without_the_others(name, count, inputs, assert_same_bits):
    call, used = CALLS[name](inputs), min(max(count, 0), T)
    got = call.run([spoiled(t, used) for t in call.per_row], counted(count, inputs.device))
    want = call.run([t[:used].contiguous() for t in call.per_row])
    for g, w in zip(got, want, strict=True):
        assert g.shape[0] == T
        assert_same_bits(g[:used], w)


@pytest.mark.parametrize("count", COUNTS)
def test_cache_rows_of_others_stay(count, inputs):
    used = min(max(count, 0), T)
    latent, k_rope = inputs.normal(T, 4), inputs.normal(T, 2)
    stream, slot = inputs.ids(2, T).int(), torch.arange(T, dtype=torch.int32, device=inputs.device)
    cache = torch.zeros(2, T, 6, dtype=inputs.dtype, device=inputs.device)
    want = cache.clone()
    want[stream[:used].long(), slot[:used].long()] = torch.cat([latent, k_rope], 1)[:used]
    ops.cache_append(cache, latent, k_rope, spoiled(stream, used), spoiled(slot, used), counted(count, inputs.device))
    assert torch.equal(cache, want)


@pytest.mark.parametrize("count", COUNTS)
def test_joint_rows_of_others_stay(count, inputs, assert_same_bits):
    used = min(max(count, 0), T)
    joint, weights = inputs.normal(T, 5 + 4 + 2), (inputs.normal(5), inputs.normal(4))
    table, slot = inputs.normal(9, 2, dtype=torch.float32), torch.arange(T, dtype=torch.int32, device=inputs.device)
    caches = [torch.zeros(1, T, 6, dtype=inputs.dtype, device=inputs.device) for _ in range(2)]

    def append(cache, joint, slot, num_rows):
        rows = ops.Rows(torch.zeros_like(slot), None, slot, slot, None, num_rows=num_rows)
        return ops.latent_append(cache, joint, *weights, table, rows, 1e-6)

    got = append(caches[0], spoiled(joint, used), spoiled(slot, used), counted(count, inputs.device))
    assert_same_bits(got[:used], append(caches[1], joint[:used].contiguous(), slot[:used].contiguous(), None))
    assert_same_bits(*caches)


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name, inputs):
    call = CALLS[name](inputs)
    operator = getattr(getattr(torch.ops, native.load()), call.operator).default
    torch.library.opcheck(operator, (*call.order(call.per_row, call.others), counted(T, inputs.device)))


@pytest.mark.parametrize("name", CALLS)
def test_a_bad_count_is_named(name, inputs):
    call = CALLS[name](inputs)
    with pytest.raises(ValueError, match=f"{name}: num_rows: expected dtype Int, got Long"):
        call.run(call.per_row, counted(T, inputs.device).long())
    with pytest.raises(ValueError, match=rf"{name}: num_rows: expected shape \[1\] = \[1\] \(-1: any\), got \[2\]"):
        call.run(call.per_row, counted(T, inputs.device).expand(2).contiguous())


NUM_NODES = [[3, 0, 5], [0, 0, 0], [5, 5, 5], [1, 1, 1]]


@pytest.fixture
def trees(device):
    """Three trees of five nodes for tiny2."""
    generator = torch.Generator().manual_seed(3)
    log_probs = torch.randn(3, 2, 4, generator=generator).log_softmax(2).sort(2, descending=True).values
    token_ids = torch.stack([torch.randperm(331, generator=generator)[:4] for _ in range(6)]).view(3, 2, 4)
    return ops.tree_build(log_probs.to(device), token_ids.to(device), torch.tensor([1, 2, 3], device=device), 4)


@pytest.mark.parametrize("num_nodes", NUM_NODES)
def test_padded_rows_are_the_rows_and_fillers(num_nodes, trees, device):
    trees.num_nodes.copy_(torch.tensor(num_nodes))
    prefix_len = torch.tensor([4, 0, 900], dtype=torch.int32, device=device)
    got = ops.tree_rows_padded(trees, prefix_len)
    arrays = reference.Tree(*(getattr(trees, name).cpu().numpy() for name in reference.Tree._fields))
    rows, begin, num_rows = reference.tree_rows_padded(arrays, prefix_len.cpu().numpy())
    for g, w in zip(got, [*rows, begin, num_rows], strict=True):
        assert np.array_equal(g.cpu().numpy(), w) and g.cpu().numpy().dtype == w.dtype
    plain = ops.tree_rows(trees, prefix_len)
    assert torch.equal(plain.token, got.token[: sum(num_nodes)]) and plain.begin is None and plain.num_rows is None


@pytest.mark.parametrize("num_nodes", NUM_NODES)
def test_a_forward_of_padded_rows_gives_the_bits_of_the_rows(num_nodes, trees, tiny2, device):
    trees.num_nodes.copy_(torch.tensor(num_nodes))
    prefix_len = torch.tensor([4, 0, 9], dtype=torch.int32, device=device)
    cache = tiny2.new_cache(3, 16)
    cache.data.normal_()
    start, results = cache.data.clone(), []
    for make in (ops.tree_rows, ops.tree_rows_padded):
        cache.data.copy_(start)
        rows = make(trees, prefix_len)
        logits = tiny2.forward(rows, trees, cache, prefix_len)
        results.append(
            (logits[: sum(num_nodes)], ops.argmax(logits, rows.num_rows)[: sum(num_nodes)], cache.data.clone())
        )
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert sum(num_nodes) == 0 or not torch.equal(results[0][2], start)


@pytest.mark.parametrize("num_nodes", NUM_NODES)
def test_accepting_by_rows_is_accepting_by_nodes(num_nodes, trees, device):
    trees.num_nodes.copy_(torch.tensor(num_nodes))
    rows = ops.tree_rows_padded(trees, torch.zeros(3, dtype=torch.int32, device=device))
    by_node = torch.where(trees.parent == -1, trees.token[:, 1:2], trees.token.roll(-2, 1))
    by_row = torch.full((15,), -(2**40), device=device)
    used = torch.arange(5, device=device) < trees.num_nodes[:, None]
    by_row[: sum(num_nodes)] = by_node[used]
    want = ops.tree_accept(trees, by_node, 2)
    got = ops.tree_accept(trees, by_row, 2, rows.begin)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    assert want[1].max() > 0 or max(num_nodes) < 2


def test_rows_outside_the_targets_are_named(trees, device):
    if device.type != "cpu":
        pytest.skip("a GPU does not look at values")
    begin, target = torch.tensor([0, 5, 11], dtype=torch.int32), torch.zeros(15, dtype=torch.int64)
    with pytest.raises(ValueError, match="tree_accept: row_begin: stream 2: expected 5 rows inside the 15 .* at 11"):
        ops.tree_accept(trees, target, 2, begin)


def test_opcheck_of_the_tree(opcheck, trees):
    prefix_len = torch.tensor([4, 0, 9], dtype=torch.int32)
    opcheck("tree_rows_padded", trees.token, trees.depth, trees.num_nodes, prefix_len)
    begin = torch.tensor([0, 5, 10], dtype=torch.int32)
    opcheck("tree_accept", trees.token, trees.parent, trees.num_nodes, trees.token.flatten(), 2, begin)
