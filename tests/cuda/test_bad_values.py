"""What operations on a GPU do with values that the CPU refuses: a row of NaN, a tree of no nodes, nothing written."""

from __future__ import annotations

import pytest
import torch

from kdtree_nb import ops
from kdtree_nb.errors import DeviceMemoryError, NonFiniteError
from kdtree_nb.model import load_model
from kdtree_nb.tree import DraftTree

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]


@pytest.fixture(autouse=True)
def on_the_gpu():
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def good_rows(result: torch.Tensor) -> list[bool]:
    """Per row, whether it is finite; a row must be NaN as a whole or not at all."""
    rows = result.flatten(1)
    assert rows.isfinite().all(1).logical_or(rows.isnan().all(1)).all()
    return rows.isfinite().all(1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_indices_outside_are_nan(dtype):
    assert good_rows(ops.embed(torch.ones(7, 5, dtype=dtype), torch.tensor([6, 7, 0, -1]))) == [
        True,
        False,
        True,
        False,
    ]
    x, table = torch.ones(4, 2, 6, dtype=dtype), torch.ones(9, 6)
    assert good_rows(ops.rope(x, table, int32([0, 9, 8, -1]))) == [True, False, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_with_an_expert_that_does_not_exist_is_nan(dtype):
    experts = ops.pack_experts(*(torch.ones(shape, dtype=dtype) for shape in ((4, 8, 32), (4, 8, 32), (4, 32, 8))))
    ids = int32([[0, 3], [1, 4], [2, 3], [-1, 2]])
    out = ops.moe_experts(torch.ones(4, 32, dtype=dtype), experts, ids, torch.ones(4, 2))
    assert good_rows(out) == [True, False, True, False]


def test_nothing_is_written_outside_the_cache():
    cache = torch.zeros(2, 5, 6)
    stream, slot = int32([0, 2, -1, 1, 1]), int32([4, 0, 0, 5, -1])
    ops.cache_append(cache, torch.ones(5, 4), torch.ones(5, 2), stream, slot)
    assert cache[0, 4].eq(1).all() and cache.sum() == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_position_outside_gives_a_query_of_nan(dtype):
    packed = ops.pack_linear(torch.ones(2, 24, 16, dtype=dtype))
    q_latent, q_rope = ops.absorb_query(torch.ones(4, 48, dtype=dtype), packed, torch.ones(9, 8), int32([0, 9, 8, -1]))
    assert q_latent.eq(16).all() and good_rows(q_rope) == [True, False, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_position_outside_gives_a_key_of_nan_and_a_place_outside_nothing(dtype):
    cache, weight = torch.zeros(2, 5, 14, dtype=dtype), torch.ones(8, dtype=dtype)
    rows = ops.Rows(int32([0, 0, 1, 1, 2]), None, int32([8, 9, 3, 3, 3]), int32([4, 0, 5, -1, 0]), None)
    q = ops.latent_append(cache, torch.ones(5, 22, dtype=dtype), weight, weight, torch.ones(9, 6), rows, 0.0)
    whole = [1.0] * 8 + [0.0] * 3 + [2.0] * 3  # a turn by cosine and sine 1 takes (1, 1) to (0, 2)
    assert q.eq(1).all() and cache[0, 4].tolist() == whole and cache[..., :8].sum() == 16
    assert cache[0, 0, 8:].isnan().all() and cache.isnan().sum() == 6
    assert cache[0, 1:4].eq(0).all() and cache[1].eq(0).all()


def test_nothing_is_written_outside_the_contexts():
    keys, values = torch.zeros(2, 5, 1, 1, 4), torch.zeros(2, 5, 1, 1, 4)
    stream, position = int32([0, 2, -1, 1, 1, 1]), int32([4, 0, 0, 5, -1, -2])
    table = torch.ones(5, 4)
    ops.context_append(keys, values, torch.ones(6, 8), torch.ones(1, 4), 1e-6, table, stream, position)
    assert keys[0, 4].ne(0).any() and values[0, 4].eq(1).all()
    keys[0, 4], values[0, 4] = 0, 0
    assert not keys.any() and not values.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_outside_gives_features_of_nan_at_no_position(dtype):
    path = torch.tensor([[1, -1], [3, -1]], dtype=torch.int32)
    place = (int32([0, 2]), int32([5, 7]), path, int32([2, 1]), int32([1, 1]))
    features, stream, position = ops.accepted_features([torch.ones(4, 8, dtype=dtype)] * 2, *place)
    assert good_rows(features) == [True, True, False, True, False, True]
    assert stream.tolist() == [0, 0, 0, 1, 1, -1] and position.tolist() == [5, 6, -1, 7, -1, -1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("stream", "prefix"), [(-1, 2), (2, 2), (1, -1), (1, 6)])
def test_a_block_that_cannot_be_is_nan(stream, prefix, dtype):
    caches = (torch.ones(2, 5, 1, 1, 8, dtype=dtype) for _ in range(2))
    norms, table = (torch.ones(8, dtype=dtype), torch.ones(8, dtype=dtype)), torch.ones(8, 8)
    place = (int32([0, stream, 1]), int32([5, prefix, 0]))
    out = ops.block_attn(torch.ones(3, 3, 4 * 8, dtype=dtype), *norms, 1e-6, table, *caches, 0, *place, 0.3)
    assert good_rows(out) == [True, False, True]


@pytest.mark.parametrize(
    ("prefix", "path", "count"),
    [(10, [3, 2], 2), (10, [0, 2], 2), (10, [1, -1], 2), (10, [1, 10], 2), (10, [1, 2], 3), (-1, [1, 2], 2)],
)
def test_a_path_that_cannot_be_moves_nothing(prefix, path, count):
    cache = torch.arange(2 * 20 * 3, dtype=torch.float32).view(2, 1, 20, 3)
    before = cache.clone()
    ops.cache_compact(cache, int32([prefix]), int32([path]), int32([count]))
    assert cache.equal(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("field", "index", "value"),
    [("node", 2, 9), ("node", 2, -1), ("depth", 2, 9), ("depth", 2, -1), ("prefix_len", 0, -1), ("prefix_len", 0, 17)],
)
def test_attention_of_rows_that_cannot_be_is_nan(field, index, value, dtype):
    fields = {
        "stream": int32([0] * 9), "node": int32(range(9)), "parent": int32([range(-1, 8)]), "depth": int32([range(9)]),
        "prefix_len": int32([4]),
    }  # fmt: skip
    fields[field].view(-1)[index] = value
    rows = ops.Rows(fields["stream"], fields["node"], None, None, None)
    tree = DraftTree(None, fields["parent"], fields["depth"], None, None, None)
    q_latent, q_rope, cache = (torch.ones(shape, dtype=dtype) for shape in ((9, 4, 64), (9, 4, 16), (1, 16, 80)))
    good = good_rows(ops.verify_attn(q_latent, q_rope, cache, rows, tree, fields["prefix_len"], 0.1))
    assert good == [field != "prefix_len" and row != 2 for row in range(9)]


def test_a_broken_tree_cannot_make_attention_hang_or_read_elsewhere():
    parent = int32([[-1, 2**30, -(2**30), 2, 5, 5]])
    rows = ops.Rows(int32([0] * 6), int32(range(6)), None, None, None)
    tree = DraftTree(None, parent, int32([[0, 1, 2, 3, 2, 1]]), None, None, None)
    out = ops.verify_attn(torch.ones(6, 2, 20), torch.ones(6, 2, 6), torch.ones(1, 9, 26), rows, tree, int32([3]), 0.1)
    assert out.isfinite().all()


@pytest.mark.parametrize(
    ("column", "value"),
    [(0, -1.0), (0, float("nan")), (0, float("inf")), (0, 1e-39), (1, -1), (1, 1025), (2, 0.0), (2, 1.5)],
)
def test_rows_that_no_token_can_be_drawn_of_are_minus_one(column, value):
    parameters = [torch.ones(3), int32([0, 5, 5]), torch.ones(3), torch.tensor([1, 2, 3])]
    parameters[column][1] = value
    logits = torch.randn(5, 300)
    token = ops.sample(logits, int32([0, 1, 2, 3, -1]), int32([0, 1, 2, 3, 4]), *parameters)
    assert token.ge(0).tolist() == [True, False, True, False, False] and token.ge(-1).all()
    position = ops.sample(logits[:2], int32([0, 0]), int32([-1, 7]), *parameters)
    assert position.ge(0).tolist() == [False, True]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_logits_give_nan_log_probs_of_their_row(value):
    logits = torch.zeros(2, 3, 101)
    logits[1, 2, 63] = value
    log_probs, ids = ops.draft_topk(logits, 5)
    assert good_rows(log_probs.flatten(0, 1)) == [True] * 5 + [False]
    assert ids[0, 0].tolist() == [0, 1, 2, 3, 4]
    assert ops.tree_build(log_probs, ids, torch.tensor([1, 2]), 4).num_nodes.tolist() == [5, 0]


@pytest.mark.parametrize(
    ("field", "index", "value"),
    [
        ("log_probs", (1, 1, 3), float("nan")), ("log_probs", (1, 0, 0), 1e-30), ("log_probs", (1, 2, 4), -2.5),
        ("token_ids", (1, 2, 3), 4), ("token_ids", (1, 1, 2), -1), ("bonus", 1, -7), ("budget", 1, -1),
        ("budget", 1, 9),
    ],
)  # fmt: skip
def test_what_no_tree_can_be_built_of_gives_no_nodes(field, index, value):
    inputs = {
        "log_probs": -torch.arange(5.0).repeat(3, 3, 1), "token_ids": torch.arange(5).repeat(3, 3, 1),
        "bonus": torch.tensor([1, 2, 3]), "budget": int32([8, 8, 8]),
    }  # fmt: skip
    inputs[field][index] = value
    tree = ops.tree_build(**inputs, max_budget=8)
    assert tree.num_nodes.tolist() == [9, 0, 9]
    assert tree.token[1].eq(-1).all() and tree.depth[1].eq(-1).all() and not tree.ancestor_bits[1].any()


def test_a_walk_ends_in_every_tree():
    tree = ops.tree_build(torch.zeros(1, 3, 1), torch.tensor([[[6], [7], [8]]]), torch.tensor([5]), 3)
    for parent in ([-1, 1, 2, 3], [0, 0, 0, 0], [-1, 3, 1, 2], [-1, 2**31 - 1, -2, 2]):
        tree.parent.copy_(int32([parent]))
        path, num_accepted, _ = ops.tree_accept(tree, torch.tensor([[6, 7, 8, 9]]), 3)
        count = num_accepted.item()
        assert 0 <= count <= 3 and path[0, count:].eq(-1).all()
        assert (path[0, :count].diff(prepend=int32([0])) > 0).all()


@pytest.mark.parametrize("count", [-1, -(2**31), 5, 2**31 - 1])
def test_node_counts_outside_the_tree(count):
    tree = ops.tree_build(torch.zeros(2, 3, 1), torch.tensor([[[6], [7], [8]]] * 2), torch.tensor([5, 5]), 3)
    tree.num_nodes[0] = count
    rows = ops.tree_rows_padded(tree, int32([10, 20]))
    used = 4 + (4 if count > 0 else 0)
    assert rows.num_rows.item() == used and rows.stream[used:].eq(-1).all() and rows.slot[used - 1] == 23
    with pytest.raises(ValueError, match="tree_rows: num_nodes: expected 0 … 4, got"):
        ops.tree_rows(tree, int32([10, 20]))
    path, num_accepted, token = ops.tree_accept(tree, torch.tensor([[6, 7, 8, 9]] * 2), 3)
    assert num_accepted.tolist() == [0, 3] and token.tolist() == [-1, 9] and path[0].eq(-1).all()


@pytest.mark.parametrize(("count", "used"), [(-3, 0), (0, 0), (2, 2), (10**9, 3)])
def test_row_counts_outside_the_rows(count, used):
    x, rows = torch.ones(3, 40), int32([count])
    assert ops.rms_norm(x, torch.ones(40), 1e-6, rows)[:used].isfinite().all()
    assert ops.residual_add(x, x, rows)[:used].eq(2).all() and ops.argmax(x, rows)[:used].eq(0).all()
    assert ops.linear(x, ops.pack_linear(torch.ones(20, 40)), num_rows=rows)[:used].eq(40).all()


@pytest.fixture
def little_memory():
    """little_memory(mib): from then on torch may take so much beyond what it holds."""

    def limit(mib: int = 32) -> None:
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + mib * 2**20) / total)

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_too_little_memory_for_an_operation(little_memory):
    logits = torch.randn(1, 2, 1000)
    want = ops.draft_topk(logits, 5)
    weight, token = torch.ones(7, 4096), torch.zeros(16384, dtype=torch.int64)
    little_memory()
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            ops.embed(weight, token)  # 256 MiB
    assert all(got.equal(first) for got, first in zip(ops.draft_topk(logits, 5), want, strict=True))


def test_too_little_memory_for_a_cache_leaves_the_engine_usable(little_memory):
    from kdtree_nb import Engine, drafters

    engine = Engine(load_model("tiny2", "cuda"), drafters.NGram(), budget=8)
    want = engine.generate_ar([5, 7, 9], 12).tokens
    little_memory(256)
    many = [[5, 7, 9]] * 6000
    with pytest.raises(
        DeviceMemoryError, match=r"LatentCache: expected .* GiB for 6000 streams .*; cuda:0 has .* free"
    ):
        engine.generate_ar(many, 100)
    assert engine.generate_ar([5, 7, 9], 12).tokens == want
    assert engine.generate_ddtree([5, 7, 9], 12).tokens == want


def test_too_little_memory_for_a_model(little_memory):
    little_memory()
    with pytest.raises(
        DeviceMemoryError, match="load_model: expected memory for the weights, torch.float32; cuda.* Use"
    ):
        [load_model("tiny", "cuda") for _ in range(8)]
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert load_model("tiny", "cuda").device.type == "cuda"


def test_a_launch_that_fails_is_told_and_forgotten():
    with pytest.raises(RuntimeError, match="rms_norm: CUDA error: invalid"):
        ops.rms_norm(torch.empty(2**31, 0), torch.empty(0), 1e-6)  # more rows than a grid has blocks, of no elements
    assert ops.residual_add(torch.ones(2, 3), torch.ones(2, 3)).eq(2).all()


def test_tensors_of_two_devices_are_an_error():
    with pytest.raises(ValueError, match="embed: token: expected a tensor on cuda:0, got one on cpu"):
        ops.embed(torch.ones(7, 5), torch.zeros(2, dtype=torch.int64, device="cpu"))


def test_inputs_of_another_length_in_the_same_padding_are_named():
    packed = ops.pack_linear(torch.ones(20, 40))
    with pytest.raises(ValueError, match="linear: packed: expected shape for K = 41 inputs, got one for 40"):
        ops.linear(torch.ones(3, 41), packed)


def test_sizes_without_a_kernel_are_named():
    with pytest.raises(ValueError, match="draft_topk: this combination of types and sizes has no kernel"):
        ops.draft_topk(torch.zeros(1, 1, 2000), 1025)


def test_a_nan_weight_is_an_error_of_the_engine():
    from kdtree_nb import Engine

    model = load_model("tiny2", "cuda")
    model.embedding[7] = float("nan")
    with pytest.raises(NonFiniteError, match="stream 0: .* position 1 "):
        Engine(model).generate_ar([5, 7], 4)
