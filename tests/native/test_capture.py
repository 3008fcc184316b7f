from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from kdtree_nb import ops
from kdtree_nb.errors import KdtreeError
from kdtree_nb.native import capture
from kdtree_nb.native.capture import Capture


def root_tree(num_streams=1):
    empty = torch.zeros(num_streams, 0, 0)
    bonus = torch.arange(num_streams)
    return ops.tree_build(empty, empty.long(), bonus, 0)


def test_a_replay_sees_new_contents_and_gives_the_same_bits():
    generator = torch.Generator().manual_seed(0)
    packed = ops.pack_linear(torch.randn(40, 33, generator=generator))
    weight, x = torch.ones(33), torch.randn(3, 33, generator=generator)

    def function():
        return ops.linear(ops.rms_norm(x, weight, 1e-6).view(3, 33), packed)

    capture = Capture(function)
    assert capture.num_calls == 2
    first = capture.result.clone()
    x.copy_(torch.randn(3, 33, generator=generator))
    assert torch.equal(capture.result, first)
    assert capture.replay()
    assert torch.equal(capture.result, function()) and not torch.equal(capture.result, first)


def test_calls_outside_are_not_recorded():
    x = torch.ones(1, 4)
    capture = Capture(lambda: ops.residual_add(x, x))
    ops.residual_add(x, x)
    assert capture.num_calls == 1


def test_every_kernel_of_the_bindings_is_recorded():
    """CpuCall takes them from kernels.h, and records each."""
    kernels = Path(__file__).parents[2] / "kernels"
    known = re.findall(r"^int (\w+)_cpu\(const (\w+)&", (kernels / "op_args.h").read_text(), re.MULTILINE)
    called = re.findall(r"X\((\w+), (\w+)\)", (kernels / "bind" / "kernels.h").read_text())
    assert len(known) > 20 and sorted(called) == sorted(known)


def test_operations_of_ranks_are_repeated():
    partials = torch.ones(2, 3, 4)
    capture = Capture(lambda: ops.add_partials(partials, torch.float32))
    partials.fill_(3.0)
    assert capture.replay() and capture.result.eq(6).all() and capture.num_calls == 1


def test_captures_are_apart():
    x = torch.ones(1, 4)
    one, two = Capture(lambda: ops.residual_add(x, x)), Capture(lambda: ops.swiglu(x))
    del one
    assert two.replay() and two.num_calls == 1


def test_intermediate_results_live_as_long_as_the_capture():
    x = torch.arange(4096.0).view(1, -1)
    capture = Capture(lambda: ops.residual_add(ops.residual_add(ops.residual_add(x, x), x), x))
    others = [torch.full_like(x, torch.nan) for _ in range(8)]
    assert capture.replay()
    assert torch.equal(capture.result, 4 * x) and all(o.isnan().all() for o in others)


def test_a_refused_replay_says_so():
    token, weight = torch.tensor([1]), torch.randn(3, 4)
    capture = Capture(lambda: ops.embed(weight, token))
    token.fill_(3)
    assert not capture.replay()
    token.fill_(2)
    assert capture.replay() and torch.equal(capture.result[0], weight[2])


def test_rows_of_another_number_are_refused():
    tree, prefix_len = root_tree(2), torch.tensor([4, 7], dtype=torch.int32)
    capture = Capture(lambda: ops.tree_rows(tree, prefix_len))
    prefix_len += 1
    assert capture.replay() and capture.result.position.tolist() == [5, 8]
    for num_nodes in ([1, 0], [2, 0], [-1, 3], [0, 0]):
        tree.num_nodes.copy_(torch.tensor(num_nodes))
        assert not capture.replay()


def test_trees_are_not_built_in_a_capture():
    with pytest.raises(ValueError, match="tree_build: expected no capture"):
        Capture(root_tree)
    assert root_tree().num_nodes.item() == 1


def test_a_capture_inside_another_is_an_error():
    x = torch.ones(1, 4)
    with pytest.raises(KdtreeError, match="one inside another"):
        Capture(lambda: Capture(lambda: ops.swiglu(x)))
    assert Capture(lambda: ops.swiglu(x)).num_calls == 1


def test_an_exception_ends_the_capture():
    with pytest.raises(ZeroDivisionError):
        Capture(lambda: 1 // 0)
    x = torch.ones(1, 4)
    assert Capture(lambda: ops.swiglu(x)).num_calls == 1


def test_an_interrupt_between_two_lines_leaves_no_capture_behind(monkeypatch):
    library = capture._library()
    begin = library.kdtree_capture_begin

    def begin_and_be_interrupted(handle):
        assert begin(handle) == 0
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(library, "kdtree_capture_begin", begin_and_be_interrupted)
        Capture(lambda: None)
    assert root_tree().num_nodes.item() == 1
