"""A spoiled result differs from the original in exactly one element, and the original is untouched."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest
import torch

from tests.book.spoil import output_names, spoil_generation, spoil_in_place, spoil_output, spoil_value


class Pair(NamedTuple):
    value: torch.Tensor
    note: None
    count: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Tree:
    token: torch.Tensor
    num_nodes: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Generation:
    tokens: list[int]
    logits: torch.Tensor | None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.bool])
@pytest.mark.parametrize("last", [False, True])
def test_one_element_of_a_tensor(dtype: torch.dtype, last: bool):
    value = torch.zeros(2, 3).to(dtype)
    spoiled = spoil_value(value, last)
    changed = (spoiled != value).reshape(-1).nonzero().reshape(-1).tolist()
    assert changed == [5 if last and dtype.is_floating_point else 0]
    assert not value.any()


def test_a_float_changes_by_its_lowest_bit():
    value = torch.tensor([1.0, -3.5])
    spoiled = spoil_value(value, last=True)
    assert spoiled[1] == torch.nextafter(value[1], torch.tensor(-torch.inf))


@pytest.mark.parametrize("value", [np.ones((2, 2)), np.ones(3, dtype=np.int64)])
def test_one_element_of_an_array(value: np.ndarray):
    assert (spoil_value(value, last=True) != value).sum() == 1


def test_outputs_of_a_tuple_and_of_a_tree():
    pair = Pair(torch.ones(2), None, torch.ones(1, dtype=torch.int32))
    assert output_names(pair) == ["value", "count"]
    spoiled = spoil_output(pair, "count", last=False)
    assert spoiled.count.tolist() == [2] and spoiled.value is pair.value
    assert output_names((torch.ones(1), 3)) == ["0", "1"]
    assert spoil_output((torch.ones(1), 3), "1", last=False)[1] == 4


def test_a_tree_is_spoiled_inside_its_nodes():
    tree = Tree(torch.tensor([[7, 8, -1, -1]]), torch.tensor([2]))
    assert spoil_output(tree, "token", last=True).token.tolist() == [[7, 9, -1, -1]]
    root_only = Tree(torch.tensor([[7, -1]]), torch.tensor([1]))
    assert spoil_output(root_only, "token", last=True).token.tolist() == [[8, -1]]


def test_generations():
    both = [Generation([1, 2], torch.zeros(2, 3)), Generation([3, 4], torch.zeros(2, 3))]
    assert [g.tokens for g in spoil_generation(both, "tokens", last=True)] == [[1, 2], [3, 5]]
    assert [g.tokens for g in spoil_generation(both, "tokens", last=False)] == [[0, 2], [3, 4]]
    assert spoil_generation(both, "logits", last=True)[1].logits.nonzero().tolist() == [[1, 2]]
    assert not both[1].logits.any()
    with pytest.raises(ValueError, match="return_logits"):
        spoil_generation(Generation([1], None), "logits", last=True)


def test_in_place():
    before, now = torch.zeros(4), torch.tensor([0.0, 1.0, 2.0, 0.0])
    spoil_in_place(now, before)
    assert now[1] == 1 and now[2] != 2 and now[3] == 0
    with pytest.raises(ValueError, match="changed nothing"):
        spoil_in_place(before, before.clone())
