from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from kdtree_nb import ops
from kdtree_nb.speculate.drafting import chain_trees

sys.path.insert(0, str(Path(__file__).parent))  # families.py: what the tests of this folder share


@pytest.fixture(scope="session")
def chain_logits():
    """(model, tokens) -> logits f32 [T, V] of one text, on the CPU."""

    def compute(model, tokens):
        tree, prefix_len = chain_trees([tokens], model.device), torch.zeros(1, dtype=torch.int32, device=model.device)
        rows = ops.tree_rows(tree, prefix_len)
        return model.forward(rows, tree, model.new_cache(1, len(tokens)), prefix_len).cpu()

    return compute


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """(family, seed) -> (transformers' model, its folder), made on first use."""
    from families import make_reference, save

    made = {}

    def get(family: str, seed: int = 0):
        if (family, seed) not in made:
            model = make_reference(family, seed)
            made[family, seed] = model, save(model, tmp_path_factory.mktemp(family), family)
        return made[family, seed]

    return get
