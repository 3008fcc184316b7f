"""Layouts for SGLang's tree verification: acceptance, masks, round trip, bad inputs."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import torch

from kdtree_nb import ops
from kdtree_nb.integrations import sglang
from kdtree_nb.integrations.sglang import TreeMaskMode
from kdtree_nb.tree import DraftTree
from tests.integrations.cases import SIZES, links_of_mask, random_trees

MODES = list(TreeMaskMode)


def zeros(tree: DraftTree) -> torch.Tensor:
    return torch.zeros(tree.num_streams, dtype=torch.int32)


def to_width(target: np.ndarray, n: int) -> np.ndarray:
    """Targets [B, N] as [B, n]; what the target says behind a filler must not matter: 0, the token of fillers."""
    out = np.zeros((len(target), n), np.int64)
    out[:, : target.shape[1]] = target
    return out


def check_acceptance(tree: DraftTree, target: np.ndarray, L: int, spare: int = 0) -> torch.Tensor:
    n = tree.max_budget + 1 + spare
    layout = sglang.to_verify_layout(tree, zeros(tree), n, TreeMaskMode.QLEN_ONLY_BITPACKING)
    got = sglang.to_accepted(sglang.verify_tree_greedy(layout, to_width(target, n), L + 1), n)
    want = ops.tree_accept(tree, torch.from_numpy(target), L)
    for ours, theirs in zip(want, got, strict=True):
        assert theirs.dtype == ours.dtype and torch.equal(theirs, ours)
    return want[1]


def test_acceptance_of_ten_thousand_ragged_trees(rng):
    """Sizes around the borders of bytes and words, in batches of different sizes, with and without spare fillers."""
    counts = []
    for round_ in range(120):
        budgets = rng.choice(SIZES, 90).tolist()
        budgets[:4] = [0, 32, 64, 128]
        tree, target = random_trees(rng, budgets, K=24 if round_ % 6 else 2)
        counts.append(check_acceptance(tree, target, L=9, spare=round_ % 3))
    counts = torch.cat(counts)
    assert len(counts) >= 10_000
    assert set(counts.tolist()) == set(range(10))  # every length, from none to all


@pytest.mark.parametrize("budget", [31, 32, 33, 63, 64, 65, 127, 128, 129, 1023])
def test_acceptance_at_one_budget(budget, rng):
    tree, target = random_trees(rng, [budget] * 20, K=64)
    assert (tree.num_nodes == budget + 1).all()
    assert check_acceptance(tree, target, L=9).max() > 0


def test_nothing_drafted_accepts_nothing(rng):
    tree, target = random_trees(rng, [0, 0, 0])
    assert tree.max_budget == 0
    assert check_acceptance(tree, target, L=9, spare=5).tolist() == [0, 0, 0]


def test_token_zero_in_trees_is_no_filler():
    chain = ops.tree_build(torch.zeros(2, 3, 1), torch.zeros(2, 3, 1, dtype=torch.long), torch.tensor([0, 0]), 3)
    short = DraftTree(chain.token, chain.parent, chain.depth, chain.log_prob, chain.ancestor_bits, torch.tensor([4, 1]))
    target = np.zeros((2, 4), np.int64)  # the target writes the token that fillers hold
    layout = sglang.to_verify_layout(short, zeros(short), 6)
    path, count, token = sglang.to_accepted(sglang.verify_tree_greedy(layout, to_width(target, 6), 6), 6)
    assert (count.tolist(), token.tolist(), path[0].tolist()) == ([3, 0], [0, 0], [1, 2, 3, -1, -1])


def test_a_walk_ends_where_the_columns_end():
    chain = ops.tree_build(torch.zeros(1, 3, 1), torch.ones(1, 3, 1, dtype=torch.long), torch.tensor([1]), 3)
    layout = sglang.to_verify_layout(chain, zeros(chain))
    verdict = sglang.verify_tree_greedy(layout, np.ones((1, 4), np.int64), 3)
    assert (verdict.accept_index.tolist(), verdict.accept_token_num.tolist()) == ([[0, 1, 2]], [2])
    assert verdict.predicts.tolist() == [1, 1, 1, -1]
    assert sglang.to_accepted(verdict, 4)[2].tolist() == [1]


def test_layout_of_a_small_tree():
    """Stream 0: root 9, children 1 and 2, and 3 below 1. Stream 1: a root alone."""
    log_probs = torch.tensor([[[-0.1, -0.5], [-0.2, -9.0]], [[-torch.inf, -torch.inf]] * 2])
    ids = torch.tensor([[[1, 2], [3, 4]]] * 2)
    tree = ops.tree_build(log_probs, ids, torch.tensor([9, 8]), 3)
    layout = sglang.to_verify_layout(tree, torch.tensor([2, 0]))
    assert layout.draft_token.tolist() == [9, 1, 3, 2, 8, 0, 0, 0]
    assert layout.positions.tolist() == [2, 3, 4, 3, 0, 0, 0, 0]
    assert layout.retrieve_index.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert layout.retrieve_next_token.tolist() == [[1, 2, -1, -1], [-1] * 4]
    assert layout.retrieve_next_sibling.tolist() == [[-1, 3, -1, -1], [-1] * 4]
    rows = ["111000", "111100", "111110", "111001", "1000", "0100", "0010", "0001"]
    assert "".join(str(int(b)) for b in layout.tree_mask) == "".join(rows)
    packed = sglang.to_verify_layout(tree, torch.tensor([2, 0]), mask_mode=TreeMaskMode.QLEN_ONLY_BITPACKING).tree_mask
    assert packed.dtype == torch.uint8 and packed[:, 0].tolist() == [1, 3, 7, 9, 1, 2, 4, 8]


@pytest.mark.parametrize("budget", [7, 8, 15, 16, 30, 31, 32, 33, 63, 64, 65, 127, 128, 129])
def test_masks_agree_with_each_other_and_with_the_tree(budget, rng):
    tree, _ = random_trees(rng, [budget, 0, budget // 2, 5])
    n, prefix_len = budget + 1, torch.tensor([0, 3, 65, 1])
    full, square, packed = (sglang.to_verify_layout(tree, prefix_len, None, mode).tree_mask for mode in MODES)
    words = packed.numpy().astype(np.uint64)
    assert packed.dtype == (torch.uint8 if n <= 8 else torch.uint16 if n <= 16 else torch.uint32)
    assert packed.shape == (4 * n, -(-n // 32)) and full.shape == ((69 + 4 * n) * n,)
    bits = packed.element_size() * 8
    begin = 0
    for b, prefix in enumerate(prefix_len.tolist()):
        count = int(tree.num_nodes[b])
        want = np.eye(n, dtype=bool)  # fillers see themselves
        want[:count, :count] = tree.visibility(b).numpy()
        rows = full[begin : begin + n * (prefix + n)].view(n, prefix + n)
        begin += n * (prefix + n)
        assert rows[:, :prefix].all() and np.array_equal(rows[:, prefix:].numpy(), want)
        assert np.array_equal(square.view(4, n, n)[b].numpy(), want)
        got = [[int(words[b * n + i, j // bits]) >> (j % bits) & 1 for j in range(n)] for i in range(n)]
        assert np.array_equal(np.array(got, dtype=bool), want)
    assert begin == len(full)


@pytest.mark.parametrize("budget", [0, 31, 32, 33, 64, 65])
def test_links_that_the_engine_derives_from_the_mask_are_ours(budget, rng):
    tree, _ = random_trees(rng, [budget, 5, 0])
    n, prefix_len = max(budget, 5) + 3, torch.tensor([4, 0, 9])
    layout = sglang.to_verify_layout(tree, prefix_len, n, TreeMaskMode.QLEN_ONLY)
    for b, visible in enumerate(layout.tree_mask.view(3, n, n).numpy()):
        depth, child, sibling = links_of_mask(visible)
        assert np.array_equal(layout.positions.view(3, n)[b], int(prefix_len[b]) + depth)
        assert np.array_equal(layout.retrieve_next_token[b], child)
        assert np.array_equal(layout.retrieve_next_sibling[b], sibling)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("budget", [0, 1, 7, 8, 16, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1023])
def test_round_trip_is_exact(budget, mode, rng):
    tree, _ = random_trees(rng, [budget, 0, budget // 3, budget], K=64)
    prefix_len = torch.tensor([0, 2, 17, 3], dtype=torch.int32)
    layout = sglang.to_verify_layout(tree, prefix_len, None, mode)
    back = sglang.to_draft_tree(layout, prefix_len, tree.log_prob)
    for field in dataclasses.fields(DraftTree):
        ours, theirs = getattr(tree, field.name), getattr(back, field.name)
        assert theirs.dtype == ours.dtype and torch.equal(theirs, ours), field.name
    unscored = sglang.to_draft_tree(layout, prefix_len).log_prob
    assert torch.equal(unscored == 0, tree.token >= 0) and unscored[tree.token < 0].eq(-torch.inf).all()


def test_wider_and_narrower_than_the_slots(rng):
    tree, _ = random_trees(rng, [12, 3, 40])
    wide = sglang.to_draft_tree(sglang.to_verify_layout(tree, zeros(tree), 70), zeros(tree))
    narrow = sglang.to_draft_tree(sglang.to_verify_layout(wide, zeros(tree), 41), zeros(tree))
    assert wide.max_budget == 69 and narrow.max_budget == 40
    for name in ("token", "parent", "depth", "ancestor_bits", "num_nodes"):
        assert torch.equal(getattr(narrow, name), getattr(tree, name))


def test_rows_are_those_of_the_engine(rng):
    tree, _ = random_trees(rng, [9, 0, 31])
    prefix_len = torch.tensor([5, 0, 77], dtype=torch.int32)
    layout, rows = sglang.to_verify_layout(tree, prefix_len), ops.tree_rows(tree, prefix_len)
    place = rows.stream.long() * 32 + rows.node
    assert torch.equal(layout.draft_token[place], rows.token)
    assert torch.equal(layout.positions[place], rows.position.long())
    assert torch.equal(layout.retrieve_index.flatten()[place], place)


@pytest.fixture
def small() -> tuple[DraftTree, sglang.VerifyLayout]:
    """Stream 0: a root, its children 4, 5 and 0, and a child 4 below each. Stream 1: a root with children 4 and 5."""
    log_probs = torch.tensor([[[-0.1, -0.2, -0.3], [-5.0, -6.0, -7.0]]] * 2)
    ids = torch.tensor([[[4, 5, 0], [4, 5, 0]]] * 2)
    tree = ops.tree_build(log_probs, ids, torch.tensor([9, 0]), torch.tensor([6, 2], dtype=torch.int32), 6)
    return tree, sglang.to_verify_layout(tree, torch.tensor([3, 4]))


BAD_ARGUMENTS = [
    (dict(draft_token_num=6), "num_nodes: expected 1 … 6 per stream, got [7, 3]"),
    (dict(draft_token_num=0), "draft_token_num: expected 1 … 1024, got 0"),
    (dict(draft_token_num=1025), "draft_token_num: expected 1 … 1024, got 1025"),
    (dict(prefix_len=torch.tensor([3])), "prefix_len: expected int32 or int64 [2], got torch.int64 [1]"),
    (dict(prefix_len=torch.tensor([3.0, 4.0])), "prefix_len: expected int32 or int64 [2], got torch.float32 [2]"),
    (dict(prefix_len=torch.tensor([3, -1])), "prefix_len: expected lengths of at least 0, got [3, -1]"),
    (dict(total_prefix_len=8), "total_prefix_len: expected the sum of prefix_len, 7, got 8"),
]


@pytest.mark.parametrize(("change", "message"), BAD_ARGUMENTS)
def test_bad_arguments(change, message, small):
    tree, _ = small
    arguments = {"prefix_len": torch.tensor([3, 4])} | change
    with pytest.raises(ValueError, match=re.escape(f"to_verify_layout: {message}")):
        sglang.to_verify_layout(tree, **arguments)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_nodes", [7, 0], "num_nodes: expected 1 … 7 per stream, got [7, 0]"),
        ("parent", [[-1, 0, 2], [-1, 0, 0]], "stream 0, node 2: expected a parent of 0 … 1, got 2"),
        ("parent", [[-1, -1, 0], [-1, 0, 0]], "stream 0, node 1: expected a parent of 0 … 0, got -1"),
        (
            "token",
            [[9, 4, 4], [9, 4, 5]],
            "stream 0: expected different tokens among the children of node 0, got token 4",
        ),
    ],
)
def test_bad_trees(field, value, message, small):
    tree, _ = small
    star = {"parent": tree.parent.clone(), "token": tree.token.clone(), "num_nodes": tree.num_nodes.clone()}
    new = torch.tensor(value, dtype=star[field].dtype)
    if new.dim() == 1:
        star[field] = new
    else:
        star[field][:, : new.shape[1]] = new
        star["num_nodes"] = torch.tensor([3, 3], dtype=torch.int32)
    spoiled = DraftTree(star["token"], star["parent"], tree.depth, tree.log_prob, tree.ancestor_bits, star["num_nodes"])
    with pytest.raises(ValueError, match=re.escape(f"to_verify_layout: {message}")):
        sglang.to_verify_layout(spoiled, torch.tensor([3, 4]))


BAD_LAYOUTS = [
    ("retrieve_next_token", 0, 0, "retrieve_next_token: stream 0, node 0: expected -1 or 1 … 6, got 0"),
    ("retrieve_next_token", 0, 7, "retrieve_next_token: stream 0, node 0: expected -1 or 1 … 6, got 7"),
    ("retrieve_next_sibling", 1, 6, "links: stream 0, node 6: expected one link to the node, got several"),
    ("retrieve_next_sibling", 7, 3, "links: stream 1, node 0: expected no sibling of the root, got one"),
    ("retrieve_next_token", 7, -1, "links: stream 1, node 1: expected no link from a node that none leads to, got one"),
    ("retrieve_next_token", 12, 6, "links: stream 1, node 5: expected no link from a node that none leads to, got one"),
    ("retrieve_next_token", 9, 4, "expected the nodes in use in front of the fillers, got a filler in front of a node"),
    ("draft_token", 8, 0, None),
    ("draft_token", 8, 5, "stream 1: expected different tokens among the children of node 0, got token 5 twice"),
    ("positions", 3, 0, "positions: element 3: expected 4, as the links imply, got 0"),
    ("retrieve_index", 3, 4, "retrieve_index: element 3: expected 3, as the links imply, got 4"),
    ("tree_mask", 0, False, "tree_mask: element 0: expected True, as the links imply, got False"),
    ("tree_mask", 4, True, "tree_mask: element 4: expected False, as the links imply, got True"),
]


@pytest.mark.parametrize(("field", "place", "value", "message"), BAD_LAYOUTS)
def test_layouts_that_contradict_themselves(field, place, value, message, small):
    _, layout = small
    spoiled = getattr(layout, field).clone()
    spoiled.view(-1)[place] = value
    bad = dataclasses.replace(layout, **{field: spoiled})
    if message is None:  # another token makes another tree, not a contradiction
        assert sglang.to_draft_tree(bad, torch.tensor([3, 4])).token[1, 1] == value
        return
    with pytest.raises(ValueError, match="to_draft_tree: .*" + re.escape(message)):
        sglang.to_draft_tree(bad, torch.tensor([3, 4]))


def test_bad_shapes(small):
    _, layout = small
    with pytest.raises(
        ValueError, match=r"to_draft_tree: tree_mask: expected torch.bool \[147\], got torch.bool \[1\]"
    ):
        sglang.to_draft_tree(dataclasses.replace(layout, tree_mask=layout.tree_mask[:1]), torch.tensor([3, 4]))
    with pytest.raises(ValueError, match=r"to_draft_tree: log_prob: expected shape \[2, 7\], got \[2, 6\]"):
        sglang.to_draft_tree(layout, torch.tensor([3, 4]), torch.zeros(2, 6))
    with pytest.raises(ValueError, match=r"verify_tree_greedy: .*shape \[2, 7\] and num_spec_step of at least 1, got"):
        sglang.verify_tree_greedy(layout, np.zeros((2, 6), np.int64), 3)
    with pytest.raises(ValueError, match="to_accepted: accept_index: expected a root and rows of the stream's own 7"):
        sglang.to_accepted(sglang.Verdict(np.zeros(14, np.int32), np.array([[0], [6]]), np.zeros(2, np.int32)), 7)
