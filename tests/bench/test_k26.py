"""bench k26 in small: random ranks, steps, the stand-in for sums, what is counted, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kdtree_nb.bench import BenchmarkError, Effort, k26, run_groups
from kdtree_nb.bench.end_to_end import end_to_end
from kdtree_nb.bench.k26_cell import Cell
from kdtree_nb.bench.k26_prefill import Prefill
from kdtree_nb.bench.lone_ranks import LoneGroup
from kdtree_nb.bench.rank import Rank, Step, bushy_tree, chain_of, take_experts
from kdtree_nb.hf.step_work import expected_experts, rank_config
from kdtree_nb.model.ranks import ONE_RANK
from kdtree_nb.parallel import TensorParallel

CONTENDERS = ("captured", "share", "with stand-in for sums")
EFFORT = Effort(num_rounds=2, num_tokens=6, num_cases=60)


def small_plan(**changes) -> k26.Plan:
    return k26.Plan.published(8, 2, True, **({"rows": (1, 5), "prefix_lens": (40,)} | changes))


@pytest.fixture(scope="module")
def rank(device):
    with torch.inference_mode():
        return Rank(small_plan().config, 8, device, 128)


@pytest.fixture(scope="module")
def measured(device):
    where = k26.k26_lab(device.type, EFFORT)
    with torch.inference_mode():
        return [m for group in k26.k26_groups(where, small_plan()).values() for m in group(EFFORT)]


def of(measured, name):
    return [m for m in measured if m.name == name]


def test_what_is_measured(measured):
    steps = of(measured, "k26_step/captured")
    assert [(m.params["rows"], m.params["prefix_len"]) for m in steps] == [(1, 40), (5, 40)]
    assert [m.params["rows"] for m in of(measured, "k26_layer/captured")] == [1, 5]
    assert {m.params["tp"] for m in of(measured, "k26_layer/captured")} == {1}
    (floats,) = of(measured, "k26_layer/floats first")
    assert floats.params == of(measured, "k26_layer/captured")[0].params  # the same experts, so the same bits
    assert [m.params["rows"] for m in of(measured, "k26_launch/eager")] == [1]
    names = {m.name for m in measured}
    assert {"bandwidth/copy", "k26_launch/captured", "k26_memory/weights"} <= names
    assert {n for n in names if n.startswith("k26_step/")} == {f"k26_step/{n}" for n in CONTENDERS}
    assert {n for n in names if n.startswith("k26_layer/")} == {"k26_layer/captured", "k26_layer/floats first"}
    assert all(s > 0 for m in measured for s in m.samples)


def test_steps_that_were_measured_are_kept_where_the_prefill_fails(device, monkeypatch):
    def no_room(*_):
        raise MemoryError("no room")

    monkeypatch.setattr(k26.k26_prefill, "Prefill", no_room)
    groups, failures = k26.k26_groups(k26.k26_lab(device.type, EFFORT), small_plan(rows=(1,))), []
    found = run_groups({name: groups[name] for name in ("bandwidth", "matmul", "k26_step")}, EFFORT, False, failures)
    assert {f"k26_step/{name}" for name in CONTENDERS} < {m.name for m in found}
    assert [(failure.group, failure.reason) for failure in failures] == [("k26_step", "MemoryError: no room")]


def test_params_of_a_cell_agree_and_hold_the_floor(measured):
    for cell in zip(*(of(measured, f"k26_step/{name}") for name in CONTENDERS), strict=True):
        assert all(m.params == cell[0].params for m in cell)
        assert cell[0].params["floor_s"] > 0 and cell[0].params["bytes"] > 0 and cell[0].params["flops"] > 0
        assert cell[0].params["same_experts"] is True
    few, many = of(measured, "k26_step/captured")
    assert few.params["distinct_experts"] == 8 < many.params["distinct_experts"] <= 40
    assert few.params["bytes"] < many.params["bytes"]


def test_no_row_of_a_tree_differs(measured):
    for group in ("k26_step_rows", "k26_layer_rows"):
        (counted,) = of(measured, f"{group}/native")
        assert counted.samples[0] == counted.params["rows"] >= 4
        assert counted.params["changed_rows"] == 0


def test_products_of_a_prefill(measured):
    """The shapes are those that the model's own weights have."""
    native = of(measured, "k26_prefill_product/native")
    assert [m.params for m in native] == [m.params for m in of(measured, "k26_prefill_product/torch")]
    with torch.inference_mode():
        rank = Rank(small_plan().config, 1, torch.device("cpu"), 8)
    attention, dense = rank.alone.layers[0].attention, rank.alone.layers[0].feed_forward
    have = [attention.q_kv_a, attention.q_b, attention.o_proj, dense.gate_up, dense.down]
    whole = [(m.params["N"], m.params["K"]) for m in native if m.params["tp"] == 1]
    assert whole[:5] == [(packed.num_out, packed.num_in) for packed in have]
    experts = rank.experts[0].experts
    assert whole[5:] == [(2 * experts.shared_width, 256), (256, experts.shared_width)]
    assert {m.params["tp"] for m in native} == {1, 8} and {m.params["rows"] for m in native} == {40}
    assert all(0 < m.params["matmul_s"] <= m.params["floor_s"] for m in native)


def test_a_prefill_is_measured_and_its_rows_are_those_of_steps(measured, rank):
    (whole,), (rows,) = of(measured, "k26_prefill/native"), of(measured, "k26_prefill_rows/native")
    assert whole.params["tokens"] == 40 and whole.params["chunk"] == 14
    (share,) = of(measured, "k26_prefill/share")
    assert share.params == whole.params and min(share.samples) > 0
    assert whole.params["flops"] > 40 * whole.params["layers"] * 256 * 256 and whole.params["floor_s"] > 0
    assert rows.params["changed_rows"] == 0 and rows.samples[0] == rows.params["rows"] >= 10
    with torch.inference_mode():
        prefill = Prefill(rank, 60)
        assert [tree.token.shape[1] for tree in prefill.trees] == [20, 20, 20]
        assert torch.cat([tree.token[0] for tree in prefill.trees]).tolist() == prefill.tokens
        assert {0, 19, 20, 58, 59} <= set(prefill._sampled())
        assert prefill.model is rank.alone and Prefill(rank, 60, rank.model).model is rank.model


@pytest.mark.parametrize("where", ["logits", "cache"])
def test_a_row_of_a_prefill_that_differs_is_counted(where, rank, monkeypatch):
    forward = rank.alone.forward

    def spoiled(rows, tree, cache, *rest, **keywords):
        logits = forward(rows, tree, cache, *rest, **keywords)
        if len(rows.token) > 1:
            (logits[:, 3] if where == "logits" else cache.data[1, 0, :, 5]).add_(1)
        return logits

    monkeypatch.setattr(rank.alone, "forward", spoiled)
    with torch.inference_mode():
        (counted,) = Prefill(rank, 30).exactness()
    assert counted.params["changed_rows"] == counted.samples[0] > 4


def test_tiny_and_nano_end_to_end(device, measured):
    assert not of(measured, "end_to_end/AR")  # beside the published dimensions only
    assert "end_to_end" in k26.k26_groups(k26.Lab(device), k26.Plan.published(8, 1))
    found = end_to_end(k26.k26_lab(device.type, EFFORT), dataclasses.replace(EFFORT, num_rounds=1))
    ar, trees = of(found, "end_to_end/AR"), of(found, "end_to_end/DDTree")
    assert [m.params for m in ar] == [m.params for m in trees]
    assert [(m.params["model"], m.params["dtype"]) for m in ar] == [
        (name, dtype) for name in ("tiny", "nano-k2") for dtype in ("float32", "bfloat16")
    ]  # fmt: skip
    assert {m.params["tokens"] for m in ar} == {6 * 4, 6 * 9}


def test_a_row_that_differs_is_counted(rank, monkeypatch):
    forward = rank.model.forward

    def spoiled(rows, tree, *rest):
        logits = forward(rows, tree, *rest)
        logits[:, 3] += 0 if len(rows.token) > 1 else 1
        return logits

    monkeypatch.setattr(rank.model, "forward", spoiled)
    with torch.inference_mode():
        (counted,) = k26.exactness("k26_step_rows", rank, EFFORT)
    assert 0 < counted.params["changed_rows"] < counted.params["rows"]


def test_the_projection_is_marked_and_adds_what_is_assumed(measured):
    for real, projected in zip(of(measured, "k26_step/share"), of(measured, "k26_projection/all ranks"), strict=True):
        assert projected.params["projection"] is True and "projection" not in real.params
        assert projected.params["source"] == "share"
        added = projected.params["num_reduces"] * projected.params["assumed_reduce_us"] * 1e-6
        assert projected.params["num_reduces"] == 4
        assert projected.samples == pytest.approx([s + added for s in real.samples])


def test_one_rank_alone_is_projected_from_itself(device):
    where, plan = k26.k26_lab(device.type, EFFORT), k26.Plan.published(1, 2, True, rows=(1,), prefix_lens=(40,))
    groups = k26.k26_groups(where, plan)
    with torch.inference_mode():
        found = [m for name in ("bandwidth", "matmul", "k26_step") for m in groups[name](EFFORT)]
    assert not of(found, "k26_step/share") and not of(found, "k26_step/with stand-in for sums")
    (real,), (projected,) = of(found, "k26_step/captured"), of(found, "k26_projection/all ranks")
    assert projected.params["source"] == "captured" and "same_experts" not in real.params
    assert projected.median > real.median


def test_experts_are_those_that_the_rows_chose(rank):
    step = Step(rank, bushy_tree(16, 256, rank.device))
    with torch.inference_mode():
        rank.prefix_len.fill_(40)
        found = step.distinct_experts()
    assert 0.8 < found / expected_experts(384, 8, 16) < 1.2
    assert not any("route" in vars(layer.feed_forward) for layer in rank.alone.layers)


def test_experts_of_another_step_can_be_taken(rank):
    """A model that is told which experts to take wakes those; the model whose weights it shares does not."""
    tree, other = (bushy_tree(9, 256, rank.device, seed) for seed in (0, 5))
    silent = rank.with_ranks(rank.model.ranks)
    step, alone = Step(rank, tree, rank.model), Step(rank, tree, silent)
    with torch.inference_mode():
        rank.prefix_len.fill_(40)
        before, chosen = step().logits.clone(), Step(rank, other, rank.model).experts()
        assert torch.equal(alone().logits, before) and not torch.equal(step.experts()[0], chosen[0])
        take_experts(silent, chosen)
        with rank.listening(silent) as taken:
            assert not torch.equal(alone().logits, before)
        assert torch.equal(alone.experts()[0], chosen[0])
        assert torch.equal(step().logits, before)
    assert len(taken) == 1 and torch.equal(taken[0], chosen[0])


def test_layers_that_are_not_heard_of_are_an_error(rank, monkeypatch):
    config = dataclasses.replace(rank.config.model, first_k_dense_replace=0)
    monkeypatch.setattr(rank, "config", dataclasses.replace(rank.config, model=config))
    with pytest.raises(BenchmarkError, match="2 layers with experts, heard of 1"), torch.inference_mode():
        Step(rank, bushy_tree(2, 256, rank.device)).distinct_experts()


def test_a_rank_of_eight_holds_what_the_account_says(rank):
    assert rank.config == rank_config(small_plan().config, 8)
    assert rank.alone.layers[1].attention.num_heads == 1 and rank.model.ranks.num_ranks == 8
    assert rank.alone.head.num_out == 2048 // 8 and rank.model.embedding.shape[0] == 2048


def test_a_rank_is_int4_where_the_checkpoint_is(rank):
    model, experts = rank.config.model, rank.model.layers[1].feed_forward.experts
    routed = (experts.gate_up, experts.down, experts.gate_up_scale, experts.down_scale)
    count = 3 * model.n_routed_experts * model.hidden_size * model.moe_intermediate_size
    assert sum(t.numel() * t.element_size() for t in routed if t is not None) == count * (0.5 + 2 / 32)
    with torch.inference_mode():
        again = Rank(small_plan().config, 8, rank.device, 16)
    assert torch.equal(again.model.head.data, rank.model.head.data)
    assert again.weight_bytes == rank.weight_bytes > 1e6


def test_packed_experts_give_the_bits_of_those_as_stored(device):
    with torch.inference_mode():
        rank = Rank(small_plan().config, 8, device, 64, as_stored=True)
        assert rank.experts[0].experts.gate_up_scale is not None
        step = Step(rank, bushy_tree(9, 256, device))
        stored = step().logits.clone()
        rank.pack_int4()
        assert rank.experts[0].experts.gate_up_scale is None
        assert torch.equal(step().logits, stored)


def test_trees_and_chains():
    tree = bushy_tree(33, 1000, torch.device("cpu"))
    assert int(tree.num_nodes[0]) == 33 and int(tree.depth.max()) <= 8
    assert int(bushy_tree(1, 1000, torch.device("cpu")).token[0, 0]) == int(tree.token[0, 0])
    path = tree.path(0, 32)
    chain = chain_of(tree, 32)
    assert chain.token[0].tolist() == tree.token[0, path].tolist() and int(chain.depth.max()) == len(path) - 1


@pytest.mark.parametrize("num_nodes", [-1, 0, 1025])
def test_a_tree_has_a_root_and_fits(num_nodes):
    with pytest.raises(ValueError, match=f"bushy_tree: expected 1 … 1024 nodes, got {num_nodes}"):
        bushy_tree(num_nodes, 256, torch.device("cpu"))


def test_a_rank_is_one_of_as_many_as_its_work_is_counted_for(device):
    with pytest.raises(ValueError, match="bench k26: expected 4 ranks, of which one is built, got 8"):
        Rank(small_plan().config, 4, device, 8, ranks=TensorParallel(LoneGroup(8, device)))


def test_experts_are_taken_by_every_layer_that_has_them(rank):
    ids = torch.zeros(1, 8, dtype=torch.int32, device=rank.device)
    with pytest.raises(ValueError, match="take_experts: expected ids for each of 1 layers with experts, got 2"):
        take_experts(rank.with_ranks(ONE_RANK), [ids, ids])


@pytest.mark.parametrize("stands_at", [32, 128])
def test_a_cell_measures_where_the_prefix_stands_and_its_rows_have_room(stands_at, rank, device):
    with torch.inference_mode():
        cell = Cell(k26.k26_lab(device.type, EFFORT), "k26_step/captured", Step(rank, bushy_tree(2, 256, device)), None)
        rank.prefix_len.fill_(stands_at)
        with pytest.raises(
            ValueError, match=f"k26_step/captured: expected the rank's prefix at .*, got it at {stands_at}"
        ):
            cell.measure(40 if stands_at == 32 else stands_at, EFFORT)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": ()}, "rows: expected positive integers"),
        ({"rows": (1, 1025)}, "rows: expected at most 1024, those of a tree, got 1025"),
        ({"prefix_lens": (0,)}, "prefix_lens: expected positive integers"),
        ({"prefix_lens": (9000,)}, "expected at most 8192 positions"),
        ({"reduce_us": float("nan")}, "reduce_us: expected 0 or more"),
        ({"reduce_us": float("inf")}, "reduce_us: expected 0 or more"),
        ({"reduce_us": -1.0}, "reduce_us: expected 0 or more"),
        ({"rows": (4, 1, 4)}, r"rows: expected each once, got \[4, 1, 4\]"),
        ({"prefix_lens": (64, 64)}, "prefix_lens: expected each once"),
        ({"rows": (129,)}, "expected at most 128, whose sums every rank gathers, got 129 for one of 8 ranks"),
    ],
)
def test_plans_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        small_plan(**changes)


def test_the_number_of_layers_and_ranks():
    with pytest.raises(ValueError, match="--layers: expected 1 … 61, got 62"):
        k26.Plan.published(8, 62)
    with pytest.raises(ValueError, match="num_attention_heads: expected a multiple of 1 for each of 3 ranks"):
        k26.Plan.published(3)
    with pytest.raises(ValueError, match="expected 1, 2, 4 or 8 ranks, as a reduction has 8 segments, got 16"):
        k26.Plan.published(16)
    assert k26.Plan.published(1, 2, True, rows=(129,)).rows == (129,)
    full = k26.Plan.published(8)
    assert full.config.model.num_hidden_layers == 61 and full.num_slots == 131_072 + 64
