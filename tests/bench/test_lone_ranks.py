"""A rank of several that is there alone: what is gathered without the others, and its own part of every sum."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kdtree_nb import ops
from kdtree_nb.bench import k26
from kdtree_nb.bench.lone_ranks import LoneGroup, LoneShare
from kdtree_nb.bench.rank import Rank, Step, bushy_tree
from kdtree_nb.model.ranks import ONE_RANK
from kdtree_nb.native.capture import Capture
from kdtree_nb.parallel import TensorParallel


@pytest.fixture(scope="module")
def rank(device):
    with torch.inference_mode():
        return Rank(k26.Plan.published(8, 2, True).config, 8, device, 128)


def test_what_is_gathered_alone_adds_up_to_itself(device):
    part = torch.randn(7, 33, device=device)
    gathered = LoneGroup(8, torch.device(device)).all_gather(part)
    assert gathered.shape == (8, 7, 33) and torch.equal(gathered[0], part) and not gathered[1:].any()
    assert torch.equal(ops.add_partials(gathered, torch.float32), part)


class Operations(TorchDispatchMode):
    """Names of what torch is told to do, other than views."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names += [] if function.is_view else [function._schema.name]
        return function(*args, **(kwargs or {}))


def test_gathering_alone_is_one_copy_into_zeros_that_are_kept(device):
    """Of each shape and dtype others; what another rank would send stays zero."""
    group, parts = LoneGroup(4, torch.device(device), rank=2), torch.randn(2, 5, 33, device=device)
    first = group.all_gather(parts[0])
    with Operations() as made:
        again = group.all_gather(parts[1])
    assert made.names == ["aten::copy_"]
    assert again.data_ptr() == first.data_ptr() and torch.equal(again[2], parts[1])
    assert not again[[0, 1, 3]].any()
    others = [group.all_gather(x) for x in (parts[0, :3], parts[0].long(), parts[0].view(33, 5))]
    assert len({x.data_ptr() for x in (first, *others)}) == 4 and torch.equal(again[2], parts[1])
    assert [x.dtype for x in others] == [torch.float32, torch.int64, torch.float32]


def test_sums_with_the_stand_in_are_those_of_the_rank_alone(rank):
    """To rounding: a part is one segment of the whole sum, and eight of the rank's own."""
    tree = bushy_tree(6, 256, rank.device)
    with torch.inference_mode():
        rank.prefix_len.fill_(40)
        alone, summed = Step(rank, tree)(), Step(rank, tree, rank.model)()
    assert torch.equal(alone.token, ops.argmax(alone.logits))
    assert alone.logits.shape == summed.logits.shape == (6, 2048 // 8)
    assert (alone.logits - summed.logits).abs().max() < 0.1 * alone.logits.abs().max()


@pytest.mark.parametrize("index", [0, 5])
def test_a_share_has_the_bits_of_a_rank_to_whose_parts_zeros_are_added(index, rank):
    tree, tensor_parallel = bushy_tree(6, 256, rank.device), TensorParallel(LoneGroup(8, rank.device, index))
    with torch.inference_mode():
        rank.prefix_len.fill_(40)
        share, summed = (Step(rank, tree, rank.with_ranks(r))() for r in (LoneShare(8, index), tensor_parallel))
    assert torch.equal(share.logits, summed.logits)
    assert torch.equal(share.token, ops.argmax(share.logits))


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_the_shares_of_all_ranks_are_the_whole_product(num_ranks, device):
    """In FP32, where no share is rounded before it is added."""
    x, weight = torch.randn(5, 512, device=device), torch.randn(33, 512, device=device)
    nothing = torch.zeros(5, 33, device=device)
    width = 512 // num_ranks
    parts = []
    for index in range(num_ranks):
        mine = slice(index * width, (index + 1) * width)
        share, packed = LoneShare(num_ranks, index), ops.pack_linear(weight[:, mine].contiguous())
        parts.append(share.linear(x[:, mine].contiguous(), packed, 512, nothing, None))
    want = ONE_RANK.linear(x, ops.pack_linear(weight), 512, nothing, None)
    assert torch.equal(ops.add_partials(torch.stack(parts), torch.float32), want)


@pytest.mark.cpu_only("a Capture is a CPU's; a CUDA graph takes anything")
def test_a_share_calls_operations_alone(rank, device):
    """So that a recorded step follows the prefix."""
    share = LoneShare(8)
    assert share.only_ops and share.num_ranks == 8 and repr(share) == "LoneShare(8, 0)"
    step = Step(rank, bushy_tree(6, 256, rank.device), rank.with_ranks(share))
    with torch.inference_mode():
        rank.prefix_len.fill_(40)
        recorded = step.captured(None)
        assert isinstance(recorded, Capture)
        before = recorded.result.logits.clone()
        rank.prefix_len.fill_(17)
        want = step().logits
        assert recorded.replay() and torch.equal(recorded.result.logits, want) and not torch.equal(want, before)


@pytest.mark.parametrize(("rank", "num_ranks"), [(8, 8), (-1, 8), (0, 0), (1, 1)])
def test_a_rank_that_is_none_of_them_is_refused(rank, num_ranks):
    with pytest.raises(ValueError, match=f"LoneGroup: expected a rank of 0 … num_ranks - 1, got {rank} of {num_ranks}"):
        LoneGroup(num_ranks, torch.device("cpu"), rank)
    with pytest.raises(ValueError, match="LoneShare: expected a rank|expected 1, 2, 4 or 8 ranks"):
        LoneShare(num_ranks, rank)


@pytest.mark.parametrize("num_ranks", [3, 16, 8.0, True])
def test_a_share_is_of_as_many_ranks_as_segments_can_be_dealt_to(num_ranks):
    with pytest.raises(ValueError, match="expected 1, 2, 4 or 8 ranks, as a reduction has 8 segments"):
        LoneShare(num_ranks)


def test_zeros_that_are_kept_serve_in_inference_mode_and_outside(device):
    group, parts = LoneGroup(2, torch.device(device), 1), torch.randn(3, 4, 5, device=device)
    with torch.inference_mode():
        group.all_gather(parts[0])
    assert torch.equal(group.all_gather(parts[1])[1], parts[1])
    with torch.inference_mode():
        gathered = group.all_gather(parts[2].clone())
    assert torch.equal(gathered[1], parts[2]) and not gathered[0].any()


def test_a_result_that_is_kept_across_calls_is_that_of_the_last(device):
    """Of equal shape and dtype, as the docstring says; `clone` keeps one."""
    group = LoneGroup(2, torch.device(device))
    first = group.all_gather(torch.ones(3, device=device))
    kept = first.clone()
    group.all_gather(torch.full((3,), 2.0, device=device))
    assert torch.equal(first[0], torch.full_like(kept[0], 2.0)) and torch.equal(kept[0], torch.ones_like(kept[0]))
