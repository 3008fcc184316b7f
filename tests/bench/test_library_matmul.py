"""The model with a library's matmuls computes the same model; what changes between its one-row and its tree-shaped
forwards is counted right, and nothing changes in ours."""

from __future__ import annotations

import pytest
import torch

from kdtree_nb import drafters, ops
from kdtree_nb.bench.library_matmul import LibraryModel, unpacked
from kdtree_nb.bench.row_changes import changed_rows, changed_tokens, random_texts, walk
from kdtree_nb.goldens import fp32_tolerance, load_goldens
from kdtree_nb.tiny2 import tiny2_weights

BF16 = torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_unpacking_gives_the_weights_back(device, dtype):
    weight = torch.randn(3, 37, 65).to(dtype).to(device)
    assert torch.equal(unpacked(ops.pack_linear(weight)), weight)
    assert torch.equal(unpacked(ops.pack_linear(weight[1]))[0], weight[1])


def test_the_weights_are_those_of_the_model(tiny2):
    library, weights = LibraryModel(tiny2), tiny2_weights()
    down = torch.from_numpy(weights["model.layers.3.mlp.experts.2.down_proj.weight"].copy()).float()
    assert torch.equal(library.feed_forward[3].routed[2][1].cpu(), down)
    head = torch.from_numpy(weights["lm_head.weight"].copy()).float()
    assert torch.equal(library.head.cpu(), head)


@pytest.mark.parametrize("name", ["tiny", "tiny2"])
def test_the_library_model_writes_the_golden_text(models, name):
    library, golden = LibraryModel(models(name)), load_goldens(name)[1]
    found = walk(library, golden.prompt, 48, drafters.NGram(), 16)
    assert found.tokens == golden.tokens[:48]
    error = (found.logits[:24].cpu().double() - torch.tensor(golden.logits)).abs().max()
    assert error < 4 * fp32_tolerance(golden.logits)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_nothing_changes_in_our_model(models, dtype):
    model = models("tiny2", dtype)
    text = random_texts(model, 1, 49)[0]
    rows = changed_rows(model, text[:1], text[1:])
    assert (rows.num_rows, rows.num_changed, rows.num_choices, rows.largest) == (48, 0, 0, 0.0)
    tokens = changed_tokens(model, text[:5], 40, drafters.Random())
    assert (tokens.num_tokens, tokens.num_changed, tokens.first_changed) == (40, 0, None)


def test_trees_are_used_and_follow_the_text(tiny2):
    golden = load_goldens("tiny2")[0]
    oracle = drafters.Oracle(golden.tokens[:40], 7)
    in_trees = walk(tiny2, golden.prompt, 40, oracle, 16)
    assert in_trees.tokens == golden.tokens[:40] and in_trees.num_forwards == 5
    text = random_texts(tiny2, 1, 24)[0]
    forced = walk(tiny2, golden.prompt, 24, drafters.Oracle(text, 7), 16, text)
    assert forced.tokens == text and forced.logits.shape == (24, tiny2.config.vocab_size)
    assert forced.num_forwards < walk(tiny2, golden.prompt, 24, text=text).num_forwards == 24


class Spoiled:
    """A model in which a forward of more than one row adds to one logit."""

    def __init__(self, model, place, amount):
        self.model, self.place, self.amount = model, place, amount
        self.config, self.device, self.new_cache = model.config, model.device, model.new_cache

    def forward(self, rows, *args, **kwargs):
        logits = self.model.forward(rows, *args, **kwargs)
        if logits is not None and len(rows.token) > 1:
            logits[:, self.place] += self.amount
        return logits


def test_changes_are_counted(tiny2):
    text = random_texts(tiny2, 1, 21)[0]
    found = changed_rows(Spoiled(tiny2, 7, 1000.0), text[:1], text[1:])
    assert found.num_rows == found.num_changed and found.largest == pytest.approx(1000.0, rel=1e-3)
    assert found.num_choices >= 18
    tokens = changed_tokens(Spoiled(tiny2, 7, 1000.0), text[:5], 20, drafters.Random())
    assert tokens.first_changed == 0 and tokens.num_changed >= 15
    few = changed_rows(Spoiled(tiny2, 7, 1e-3), text[:1], text[1:])
    assert few.num_changed == 20 and few.num_choices == 0 and 0 < few.largest < 2e-3
