"""A layout made on a GPU is that made on the CPU."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from kdtree_nb.integrations import sglang
from kdtree_nb.tree import DraftTree
from tests.integrations.cases import random_trees

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]


@pytest.mark.parametrize("mode", list(sglang.TreeMaskMode))
@pytest.mark.parametrize("budget", [0, 7, 15, 32, 33, 64, 129, 1023])
def test_layout_and_round_trip(budget, mode):
    tree, _ = random_trees(np.random.default_rng(budget), [budget, 0, budget // 2], K=64)
    prefix_len = torch.tensor([3, 0, 70])
    there = DraftTree(*(getattr(tree, f.name).cuda() for f in dataclasses.fields(DraftTree)))
    ours = sglang.to_verify_layout(tree, prefix_len, mask_mode=mode)
    theirs = sglang.to_verify_layout(there, prefix_len.cuda(), mask_mode=mode, total_prefix_len=73)
    for field in dataclasses.fields(sglang.VerifyLayout)[:-1]:
        here = getattr(theirs, field.name)
        assert here.is_cuda
        assert torch.equal(here.cpu().view(torch.uint8), getattr(ours, field.name).view(torch.uint8))
    back = sglang.to_draft_tree(theirs, prefix_len.cuda(), there.log_prob)
    for field in dataclasses.fields(DraftTree):
        assert torch.equal(getattr(back, field.name).cpu(), getattr(tree, field.name)), field.name
