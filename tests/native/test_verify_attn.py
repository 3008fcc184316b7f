"""verify_attn against float64; the same bits for a node in any tree, batch, prefill chunk or one-token step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kdtree_nb import reference
from kdtree_nb.native import ops
from kdtree_nb.tree import DraftTree

pytestmark = pytest.mark.usefixtures("on_device")
BY_VALUE = pytest.mark.cpu_only("a GPU does not look at values: tests/cuda/test_bad_values.py")

GARBAGE = 2**30
"""What fills tree slots that nobody may read."""


def random_trees(rng, sizes, num_slots, deep=False):
    """numpy (parent, depth) i32 [S, N] of random trees; `deep` makes chains likely. Unused slots hold garbage."""
    parent = np.full((len(sizes), num_slots), GARBAGE, np.int32)
    depth = np.full((len(sizes), num_slots), GARBAGE, np.int32)
    for s, size in enumerate(sizes):
        for node in range(size):
            low = max(0, node - 2) if deep else 0
            parent[s, node] = rng.integers(low, node) if node else -1
            depth[s, node] = depth[s, parent[s, node]] + 1 if node else 0
    return parent, depth


def chain(size):
    return np.arange(-1, size - 1, dtype=np.int32)[None], np.arange(size, dtype=np.int32)[None]


class Case:
    """Queries and a cache for all nodes of some trees, unused cache slots poisoned with NaN."""

    def __init__(self, rng, dtype, prefix, parent, depth, sizes, H, C, R):
        def make(*shape):
            return torch.from_numpy(rng.standard_normal(shape)).to(dtype)

        self.prefix, self.parent, self.depth = np.array(prefix, np.int32), parent, depth
        pairs = [(s, node) for s, size in enumerate(sizes) for node in range(size)]
        self.stream, self.node = np.array(pairs, np.int32).reshape(-1, 2).T
        self.q_latent, self.q_rope = make(len(pairs), H, C), make(len(pairs), H, R)
        num_slots = max(p + n for p, n in zip(prefix, sizes, strict=True)) + 3
        self.cache = torch.full((len(prefix), num_slots, C + R), float("nan"), dtype=dtype)
        for s, (length, size) in enumerate(zip(prefix, sizes, strict=True)):
            self.cache[s, : length + size] = make(length + size, C + R)
        self.scale = (C + R) ** -0.5

    def run(self, rows=slice(None)):
        tensors = [torch.from_numpy(np.ascontiguousarray(a)) for a in (
            self.stream[rows], self.node[rows], self.parent, self.depth, self.prefix)]  # fmt: skip
        return run_native(self.q_latent[rows], self.q_rope[rows], self.cache, *tensors, self.scale)

    def reference(self, rounding, rows=slice(None)):
        return reference.verify_attn(
            self.q_latent[rows].double().numpy(), self.q_rope[rows].double().numpy(), self.cache.double().numpy(),
            reference.Rows(self.stream[rows], self.node[rows], None, None, None),
            reference.Tree(None, self.parent, self.depth, None, None, None), self.prefix, self.scale, rounding,
        )  # fmt: skip

    def slots(self, t):
        """Cache slots that row t sees, in order of position."""
        nodes, node = [], self.node[t]
        while node >= 0:
            nodes.append(node)
            node = self.parent[self.stream[t], node]
        length = self.prefix[self.stream[t]]
        return [*range(length), *(length + node for node in nodes[::-1])]

    def decode(self, t):
        """Row t by one-token decoding: its ancestors committed to the prefix, the node alone in its tree."""
        visible = self.cache[self.stream[t], self.slots(t)][None]
        poison = torch.full_like(visible[:, :2], float("nan"))
        zero, root = torch.zeros(1, dtype=torch.int32), torch.full((1, 1), -1, dtype=torch.int32)
        length = torch.tensor([visible.shape[1] - 1], dtype=torch.int32)
        return run_native(self.q_latent[t : t + 1], self.q_rope[t : t + 1], torch.cat([visible, poison], 1), zero, zero,
                          root, zero[None], length, self.scale)  # fmt: skip


def run_native(q_latent, q_rope, cache, stream, node, parent, depth, prefix_len, scale):
    rows = ops.Rows(stream, node, None, None, None)
    tree = DraftTree(None, parent, depth, None, None, None)
    return ops.verify_attn(q_latent, q_rope, cache, rows, tree, prefix_len, scale)


def attention_error(dtype):
    """For assert_close: weights sum to 1, latents are below 5, and in BF16 each weight may round to the other side."""
    return 5.0 + (5 * 2.0**-8 / 2e-6 if dtype == torch.bfloat16 else 0.0)


# prefix lengths, tree sizes, H, C, R
SHAPES = [
    ([0], [1], 1, 1, 1), ([0], [17], 4, 64, 16), ([63], [2], 6, 48, 12), ([64], [33], 6, 48, 12),
    ([65], [31], 3, 20, 6), ([128, 0, 61], [17, 1, 64], 4, 64, 16), ([200, 5], [0, 65], 5, 33, 2),
    ([7, 300], [12, 9], 16, 512, 64), ([100], [6], 33, 40, 8),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("deep", [False, True])
def test_equals_the_reference(shape, deep, rng, dtype, rounding, assert_close):
    prefix, sizes, H, C, R = shape
    parent, depth = random_trees(rng, sizes, max(sizes) + 2, deep)
    c = Case(rng, dtype, prefix, parent, depth, sizes, H, C, R)
    assert_close(c.run(), c.reference(rounding), attention_error(dtype))


@pytest.mark.parametrize("start", [0, 1, 40, 63, 64, 65, 128])
def test_a_node_has_the_bits_of_one_token_decoding(start, rng, dtype, assert_same_bits):
    prefix, sizes = [start, 2 * start], [40, 70]
    parent, depth = random_trees(rng, sizes, 75, deep=True)
    c = Case(rng, dtype, prefix, parent, depth, sizes, 6, 48, 12)
    got = c.run()
    assert got.isfinite().all()
    for t in range(0, len(c.node), 3):
        assert_same_bits(got[t : t + 1], c.decode(t))


@pytest.mark.parametrize(("H", "C", "R"), [(4, 64, 16), (16, 512, 64), (1, 20, 6), (40, 33, 2)])
def test_a_row_has_the_same_bits_among_any_rows_and_threads(H, C, R, rng, dtype, assert_same_bits, num_threads, device):
    sizes = [33, 1, 31]
    parent, depth = random_trees(rng, sizes, 40)
    c = Case(rng, dtype, [150, 64, 0], parent, depth, sizes, H, C, R)
    with num_threads(1):
        alone = torch.cat([c.run(slice(t, t + 1)) for t in range(65)])
    for threads in (1, 2):
        with num_threads(threads):
            for count in (2, 17, 33, 34, 65):
                assert_same_bits(c.run(slice(count)), alone[:count])
            assert_same_bits(c.run(slice(20, None)), alone[20:])
            shuffled = rng.permutation(65)
            if device.type == "cuda":
                shuffled = np.concatenate([rng.permutation(33), [33], 34 + rng.permutation(31)])  # streams together
            assert_same_bits(c.run(shuffled), alone[shuffled])


@pytest.mark.parametrize("start", [0, 50, 64])
def test_prefill_has_the_bits_of_one_token_decoding(start, rng, dtype, assert_same_bits):
    parent, depth = chain(200)
    c = Case(rng, dtype, [start], parent, depth, [200], 4, 64, 16)
    got = c.run()
    for t in (0, 1, 13, 14, 15, 62, 63, 64, 65, 127, 128, 199):
        assert_same_bits(got[t : t + 1], c.decode(t))


def test_longest_chain_and_long_prefix(rng, dtype, rounding, assert_close):
    parent, depth = chain(1024)
    c = Case(rng, dtype, [3000], parent, depth, [1024], 4, 64, 16)
    got, rows = c.run(), [0, 71, 72, 500, 1023]
    assert_close(got[rows], c.reference(rounding, rows), attention_error(dtype))


def test_large_scores_do_not_overflow(rng, dtype, assert_close, rounding):
    parent, depth = random_trees(rng, [9], 9)
    c = Case(rng, dtype, [90], parent, depth, [9], 3, 20, 6)
    c.scale = 200.0
    assert_close(c.run(), c.reference(rounding), attention_error(dtype) + 200 * 3.0)  # errors of scores grow with them


def test_nan_of_one_row_reaches_only_its_descendants(rng, dtype):
    parent, depth = chain(20)
    parent[0, 10] = 3  # a branch beside the poisoned node
    depth[0, 10:] = np.arange(4, 14)
    c = Case(rng, dtype, [60], parent, depth, [20], 4, 64, 16)
    c.cache[0, 60 + 7] = float("nan")
    assert c.run().isfinite().flatten(1).all(dim=1).tolist() == [node not in (7, 8, 9) for node in range(20)]


def arguments(rng, **changes):
    parent, depth = random_trees(rng, [9], 9)
    c = Case(rng, torch.float32, [4], parent, depth, [9], 2, 8, 4)
    values = {
        "q_latent": c.q_latent, "q_rope": c.q_rope, "cache": c.cache, "stream": torch.from_numpy(c.stream.copy()),
        "node": torch.from_numpy(c.node.copy()), "parent": torch.from_numpy(parent), "depth": torch.from_numpy(depth),
        "prefix_len": torch.from_numpy(c.prefix), "scale": c.scale,
    }  # fmt: skip
    for name, change in changes.items():
        values[name] = change(values[name]) if callable(change) else change
    return values


def test_opcheck(rng, opcheck):
    opcheck("verify_attn", *arguments(rng).values())


def changed(index, value):
    """A function that sets one element of a tensor."""

    def change(tensor):
        tensor.view(-1)[index] = value
        return tensor

    return change


@BY_VALUE
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parent": changed(3, 3)}, "verify_attn: expected a parent index from 0 up to below the node's own"),
        ({"parent": changed(3, 8)}, "verify_attn: expected a parent index"),
        ({"parent": changed(3, -2)}, "verify_attn: expected a parent index"),
        ({"parent": changed(3, -1)}, "verify_attn: expected a parent index"),
        ({"parent": changed(0, 0)}, "verify_attn: expected a parent index"),
        ({"depth": changed(8, 9)}, "verify_attn: expected a parent index"),
        ({"depth": changed(8, -1)}, "verify_attn: expected a parent index"),
        ({"depth": changed(0, 1)}, "verify_attn: expected a parent index"),
        ({"node": changed(2, 9)}, "verify_attn: node: expected 0 … 8, got 9 at index 2"),
        ({"stream": changed(2, 1)}, "verify_attn: stream: expected 0 … 0, got 1 at index 2"),
        ({"prefix_len": changed(0, -1)}, "verify_attn: prefix_len: expected 0 … 16, got -1"),
        ({"prefix_len": changed(0, 10)}, "verify_attn: expected tree nodes at slots below 16"),
    ],
)
def test_bad_values_are_named(changes, message, rng):
    with pytest.raises(ValueError, match=message):
        run_native(**arguments(rng, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_rope": torch.zeros(9, 2, 5)}, r"verify_attn: cache: expected shape .*13.*got .*12"),
        ({"depth": torch.zeros(1, 8, dtype=torch.int32)}, r"verify_attn: depth: expected shape .*1, 9.*got .*1, 8"),
        ({"cache": torch.zeros(1, 16, 12).bfloat16()}, "verify_attn: cache: expected dtype Float, got BFloat16"),
    ],
)
def test_bad_input_is_named(changes, message, rng):
    with pytest.raises(ValueError, match=message):
        run_native(**arguments(rng, **changes))
