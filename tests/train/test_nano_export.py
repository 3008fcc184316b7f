"""The trained target as a checkpoint folder: read by `load_model`, `transformers` and the trainer's own model alike."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
import torch

from kdtree_nb import Engine, drafters, load_model
from kdtree_nb.errors import CheckpointError, CorpusError
from kdtree_nb.model import checkpoint
from kdtree_nb.train.nano.continuations import Plan, generate, load_continuations, part_path
from kdtree_nb.train.nano.decode import greedy_batch
from kdtree_nb.train.nano.export import export_model, folder_fingerprint, load_plain, round_weights, write_record
from kdtree_nb.train.nano.recipe import NANO_CONFIG
from kdtree_nb.train.nano.trainer import Trainer

CPU = torch.device("cpu")
RELATIVE_TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def target(toy_config, toy_recipe, toy_corpus, toy_tokenizer, tmp_path_factory):
    """(model with rounded weights, its folder) after a short run."""
    torch.set_num_threads(1)
    trainer = Trainer(toy_config, toy_recipe, toy_corpus, CPU)
    trainer.run(toy_recipe.num_steps)
    folder = tmp_path_factory.mktemp("target")
    round_weights(trainer.model)
    export_model(trainer.model, folder, toy_tokenizer)
    write_record(folder, {"train_curve": trainer.train_curve})
    return trainer.model.requires_grad_(False), folder


@pytest.fixture(scope="module")
def text(toy_corpus) -> list[int]:
    return toy_corpus.streams["code"][1:61].tolist()


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.allclose(got, want, rtol=0, atol=RELATIVE_TOLERANCE * want.abs().max().item())


def test_the_folder_gives_the_same_model_back(target, text):
    model, folder = target
    loaded = load_plain(folder, CPU)
    assert loaded.config == model.config
    assert all(
        torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), model.state_dict().values(), strict=True)
    )
    assert torch.equal(loaded(torch.tensor([text]))[0], model(torch.tensor([text]))[0])


def test_transformers_computes_the_same(target, text):
    transformers = pytest.importorskip("transformers")
    model, folder = target
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids = torch.tensor([text])
    with torch.no_grad():
        want = reference(ids).logits
    assert want.abs().max() > 1 and close(model(ids)[0], want)
    greedy = reference.generate(ids, max_new_tokens=64, min_new_tokens=64, do_sample=False, eos_token_id=None)
    assert greedy[0, len(text) :].tolist() == model.greedy(text, 64)
    assert (
        load_model(folder).tokenizer.encode("value")
        == transformers.AutoTokenizer.from_pretrained(folder)("value").input_ids
    )


def test_the_engine_computes_the_same(target, text):
    model, folder = target
    loaded = load_model(folder)
    engine = Engine(loaded, drafter=drafters.NGram(), budget=16)
    ar = engine.generate_ar(text, 64, stop_token_ids=[], return_logits=True)
    assert ar.tokens == model.greedy(text, 64)
    whole = torch.tensor([text + ar.tokens])
    assert close(ar.logits, model(whole)[0][0, len(text) - 1 : -1])
    assert engine.generate_ddtree(text, 64, stop_token_ids=[]).tokens == ar.tokens
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("self.value = 1")) == "self.value = 1"


def test_the_record_has_the_hash_of_every_file(target):
    folder = target[1]
    record = json.loads((folder / "training.json").read_text())
    assert {"config.json", "tokenizer.json", "model-00001-of-00001.safetensors"} < record["files"].keys()
    for name, entry in record["files"].items():
        data = (folder / name).read_bytes()
        assert entry == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def test_the_model_is_found_by_name(target, monkeypatch, tmp_path):
    monkeypatch.setitem(checkpoint._SHIPPED, "nano-k2", target[1])
    assert load_model("nano-k2").config == target[0].config
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(checkpoint._SHIPPED, "nano-k2", tmp_path)
    with pytest.raises(CheckpointError, match="weights of 'nano-k2' at .* found none; train it: kdtree-nb train-nano"):
        load_model("nano-k2")


COMMITTED = checkpoint.DATA_DIR / "nano-k2"


@pytest.mark.skipif(not (COMMITTED / "config.json").is_file(), reason="nano-k2's weights are not in data/")
def test_committed_weights_are_those_of_the_record_and_transformers_computes_the_same():
    transformers = pytest.importorskip("transformers")
    record = json.loads((COMMITTED / "training.json").read_text())
    for name, entry in record["files"].items():
        assert hashlib.sha256((COMMITTED / name).read_bytes()).hexdigest() == entry["sha256"], name
    assert load_plain(COMMITTED, CPU).config == NANO_CONFIG
    reference = transformers.AutoModelForCausalLM.from_pretrained(COMMITTED, dtype=torch.float32).eval()
    model = load_model("nano-k2")
    prompts = json.loads((checkpoint.DATA_DIR / "prompts.json").read_text())["prompts"]
    for prompt in [p["text"] for p in prompts if p["kind"] == "code"][:4]:
        ids = model.tokenizer.encode(prompt)
        want = reference.generate(
            torch.tensor([ids]), max_new_tokens=64, min_new_tokens=64, do_sample=False, eos_token_id=None
        )
        assert Engine(model).generate_ar(ids, 64, stop_token_ids=[]).tokens == want[0, len(ids) :].tolist()


# ----------------------------------------------------------------------------------------------------- continuations
PLAN = Plan(num_texts=7, part_texts=3, total_len=40, prompt_lens=(12, 5), seed=4)


def made(target, toy_corpus, folder, plan=PLAN, target_name="t"):
    generate(target[0], toy_corpus.streams["train"], plan, folder, {"target": target_name})
    return load_continuations(folder)


def test_texts_are_the_targets_own(target, toy_corpus, tmp_path):
    found = made(target, toy_corpus, tmp_path)
    assert found.tokens.shape == (7, 40) and found.prompt_len.tolist() == [12, 12, 12, 5, 5, 5, 12]
    stream = toy_corpus.streams["train"].tobytes()
    for row, length in zip(found.tokens, found.prompt_len, strict=True):
        assert row[:length].tobytes() in stream
        assert target[0].greedy(row[:length].tolist(), 40 - length) == row[length:].tolist()
    assert len(np.unique(found.tokens[:, :5], axis=0)) > 4
    assert found.metadata["plan"]["seed"] == 4


def test_a_stopped_generation_goes_on(target, toy_corpus, tmp_path, monkeypatch):
    whole = made(target, toy_corpus, tmp_path / "whole")
    made(target, toy_corpus, tmp_path / "cut")
    kept = part_path(tmp_path / "cut", 0).stat().st_mtime_ns
    part_path(tmp_path / "cut", 1).unlink()
    with pytest.raises(CorpusError, match="part-00001.kdtr: expected 3 parts, got none of this name"):
        load_continuations(tmp_path / "cut")
    calls = []
    monkeypatch.setattr(
        "kdtree_nb.train.nano.continuations.greedy_batch", lambda *args: calls.append(1) or greedy_batch(*args)
    )
    again = made(target, toy_corpus, tmp_path / "cut")
    assert len(calls) == 1 and part_path(tmp_path / "cut", 0).stat().st_mtime_ns == kept
    assert np.array_equal(again.tokens, whole.tokens) and again.metadata == whole.metadata


def test_parts_of_another_target_or_plan_are_refused(target, toy_corpus, tmp_path):
    made(target, toy_corpus, tmp_path)
    with pytest.raises(CorpusError, match="target: expected u, got t; use another folder"):
        made(target, toy_corpus, tmp_path, target_name="u")
    with pytest.raises(CorpusError, match="plan: expected"):
        made(target, toy_corpus, tmp_path, plan=Plan(7, 3, 41, (12, 5), 4))


@pytest.mark.parametrize("fields", [{"prompt_lens": (0,)}, {"prompt_lens": (40,)}, {"num_texts": 0}])
def test_an_impossible_plan_is_refused(fields):
    with pytest.raises(ValueError, match="continuations: expected texts and prompts of 1"):
        Plan(**{"total_len": 40, "prompt_lens": (5,), **fields})


def test_the_fingerprint_is_of_the_weights(target, tmp_path):
    folder = target[1]
    before = folder_fingerprint(folder)
    path = tmp_path / "model-00001-of-00001.safetensors"
    path.write_bytes((folder / path.name).read_bytes()[:-1] + b"x")
    assert folder_fingerprint(tmp_path) != before == folder_fingerprint(folder)
