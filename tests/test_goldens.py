"""The committed goldens are what the reference computes today, and a wrong one does not pass."""

from __future__ import annotations

import numpy as np
import pytest

from kdtree_nb import goldens
from kdtree_nb.goldens import GOLDENS_DIR, MODELS, check_refs, fp32_tolerance, load_goldens, make_refs
from kdtree_nb.kdtr import open_kdtr, write_kdtr
from kdtree_nb.reference import ReferenceModel
from kdtree_nb.tiny2 import tiny2_config, tiny2_weights


@pytest.mark.parametrize("model", MODELS)
def test_regenerated_goldens_are_the_committed_ones(model):
    check_refs([model])


@pytest.mark.parametrize("model", MODELS)
def test_margins_belong_to_the_logits_and_exceed_the_tolerance(model):
    with_logits = [golden for golden in load_goldens(model) if golden.logits is not None]
    assert len(with_logits) >= 2
    for golden in with_logits:
        assert len(golden.logits) == 24 and golden.logits.dtype == np.float64
        for token, margin, row in zip(golden.tokens, golden.margins, golden.logits, strict=False):
            others = np.delete(row, token)
            assert row[token] - others.max() == margin
            assert margin > 4 * fp32_tolerance(golden.logits)


@pytest.mark.parametrize("model", MODELS)
def test_enough_text_that_is_worth_comparing(model):
    found = load_goldens(model)
    num_prompts, num_tokens = {"tiny": (10, 256), "tiny2": (4, 128)}[model]
    assert len({tuple(golden.prompt) for golden in found}) >= num_prompts
    assert all(len(golden.tokens) == len(golden.margins) == num_tokens for golden in found)
    assert all(len(set(golden.tokens)) >= 8 for golden in found)
    assert (GOLDENS_DIR / f"{model}.kdtr").stat().st_size <= 300_000


def test_naive_attention_gives_the_same_logits():
    model = ReferenceModel(tiny2_config(), tiny2_weights())
    for golden in load_goldens("tiny2")[:2]:
        naive = model.logits(golden.prompt + golden.tokens[:23], "naive")[len(golden.prompt) - 1 :]
        assert np.abs(naive - golden.logits).max() <= 1e-9


def test_made_files_pass(tmp_path):
    assert make_refs(["tiny2"], tmp_path / "new") == {"tiny2": tmp_path / "new" / "tiny2.kdtr"}
    check_refs(["tiny2"], tmp_path / "new")


def change(name, index, value):
    def plant(arrays, metadata):
        arrays[name][index] = value

    return plant


def drift(arrays, metadata):
    arrays["random_12.logits"][0, 7] += 2e-9


def drop_logits(arrays, metadata):
    del arrays["random_1.logits"]


def drop_prompt(arrays, metadata):
    metadata["prompts"].remove("random_33")


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (change("random_12.tokens", 5, 330), "random_12: expected tokens"),
        (change("random_33.prompt", 0, 0), "random_33: expected prompt"),
        (change("random_1.logits", (23, 330), np.nan), "random_1: expected logits within 1e-09"),
        (drift, "random_12: expected logits within 1e-09"),
        (change("random_64.margins", 127, 1.0), "random_64: expected margins within 1e-09"),
        (drop_logits, "random_1: expected logits"),
        (drop_prompt, "expected prompts"),
    ],
)
def test_planted_differences_are_found(tmp_path, plant, message):
    file = open_kdtr(GOLDENS_DIR / "tiny2.kdtr")
    arrays = {name: file.array(name).copy() for name in file.names}
    plant(arrays, file.metadata)
    write_kdtr(tmp_path / "tiny2.kdtr", arrays, file.metadata)
    with pytest.raises(ValueError, match=f"check_refs: tiny2: {message}"):
        check_refs(["tiny2"], tmp_path)


def test_prompts_without_the_margin_are_left_out(monkeypatch, tmp_path):
    smallest = min(load_goldens("tiny2"), key=lambda golden: golden.margins.min())
    monkeypatch.setattr(goldens, "MARGIN_FACTOR", smallest.margins.min() / 8e-6)
    with pytest.raises(ValueError, match=f"make_refs: tiny2: expected 4 prompts with the margin.*{smallest.name}"):
        make_refs(["tiny2"], tmp_path)


def test_unknown_model(tmp_path):
    with pytest.raises(ValueError, match="make_refs: expected a model of .*got 'huge'"):
        make_refs(["huge"], tmp_path)
