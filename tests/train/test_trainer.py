"""Training runs: repeatable, resumable as if nothing had happened, balanced; checkpoints of bounded files."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from kdtree_nb.errors import CheckpointError
from kdtree_nb.train import checkpoint as module
from kdtree_nb.train.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from kdtree_nb.train.nano.recipe import CPU_CONFIG, NANO_CONFIG, PRESETS, Recipe
from kdtree_nb.train.nano.trainer import Trainer
from kdtree_nb.train.plain_model import PlainModel

CPU = torch.device("cpu")


def trained(config, recipe, corpus, until=None, **checkpoints) -> Trainer:
    trainer = Trainer(config, recipe, corpus, CPU)
    trainer.run(recipe.num_steps if until is None else until, **checkpoints)
    return trainer


@pytest.fixture(scope="module")
def uninterrupted(toy_config, toy_recipe, toy_corpus) -> Trainer:
    torch.set_num_threads(1)
    return trained(toy_config, toy_recipe, toy_corpus)


def assert_equal_runs(one: Trainer, other: Trainer) -> None:
    assert one.train_curve == other.train_curve and one.heldout_curve == other.heldout_curve
    assert all(torch.equal(a, b) for a, b in zip(*(t.model.state_dict().values() for t in (one, other)), strict=True))


# -------------------------------------------------------------------------------------------------------------- runs
def test_one_seed_gives_one_curve(toy_config, toy_recipe, toy_corpus, uninterrupted):
    assert_equal_runs(trained(toy_config, toy_recipe, toy_corpus), uninterrupted)
    other = trained(toy_config, dataclasses.replace(toy_recipe, seed=1), toy_corpus, until=3)
    assert other.train_curve != uninterrupted.train_curve[:3]


@pytest.mark.parametrize("stop", [1, 13])
def test_a_resumed_run_is_the_uninterrupted_one(toy_config, toy_recipe, toy_corpus, uninterrupted, tmp_path, stop):
    trained(toy_config, toy_recipe, toy_corpus, until=stop, checkpoints=tmp_path, every=5)
    second = Trainer(toy_config, toy_recipe, toy_corpus, CPU)
    assert second.resume(tmp_path) and second.step == stop
    second.run(toy_recipe.num_steps, tmp_path)
    assert_equal_runs(second, uninterrupted)


def test_losses_between_curve_points_survive_a_checkpoint(toy_config, toy_recipe, toy_corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("kdtree_nb.train.run.NUM_CURVE_POINTS", 4)
    whole = trained(toy_config, toy_recipe, toy_corpus)
    trained(toy_config, toy_recipe, toy_corpus, until=8, checkpoints=tmp_path)
    second = Trainer(toy_config, toy_recipe, toy_corpus, CPU)
    second.resume(tmp_path)
    second.run(toy_recipe.num_steps)
    assert [p["step"] for p in whole.train_curve] == [6, 12, 18, 24]
    assert_equal_runs(second, whole)


def test_it_learns_and_evens_the_load(uninterrupted, toy_recipe):
    losses = [point["nats_per_token"] for point in uninterrupted.train_curve]
    assert losses[-1] < losses[0] - 2 and len(losses) == toy_recipe.num_steps
    assert uninterrupted.heldout_curve[-1]["bits_per_byte"] < uninterrupted.heldout_curve[0]["bits_per_byte"]
    assert all(bias.abs().max() > 0 for bias in uninterrupted.biases) and len(uninterrupted.biases) == 2


def test_the_bias_moves_towards_an_even_load(toy_config, toy_recipe, toy_corpus):
    trainer = Trainer(toy_config, dataclasses.replace(toy_recipe, bias_rate=0.01, num_steps=400), toy_corpus, CPU)
    for optimizer in trainer.optimizers:  # nothing but the biases moves
        for group in optimizer.param_groups:
            group["peak_lr"] = 0.0
    with torch.no_grad():
        trainer.model.layers[1].mlp.gate.weight.normal_(std=0.3)
    spread = []
    for _ in range(60):
        loads = trainer.evaluate("train", 8)[1][0]
        spread.append((loads.max() - loads.min()).item())
        trainer.advance()
    assert np.mean(spread[-10:]) < 0.5 * spread[0]


def test_nothing_to_resume(toy_config, toy_recipe, toy_corpus, tmp_path):
    assert Trainer(toy_config, toy_recipe, toy_corpus, CPU).resume(tmp_path) is False


def test_a_checkpoint_of_another_run_is_refused(toy_config, toy_recipe, toy_corpus, tmp_path):
    trained(toy_config, toy_recipe, toy_corpus, until=1, checkpoints=tmp_path)
    other = Trainer(toy_config, dataclasses.replace(toy_recipe, seed=5), toy_corpus, CPU)
    with pytest.raises(CheckpointError, match="recipe: expected .*'seed': 5"):
        other.resume(tmp_path)
    other = Trainer(dataclasses.replace(toy_config, intermediate_size=33), toy_recipe, toy_corpus, CPU)
    with pytest.raises(CheckpointError, match="config: expected"):
        other.resume(tmp_path)


def test_a_loss_that_is_no_number_stops_the_run(toy_config, toy_recipe, toy_corpus):
    trainer = Trainer(toy_config, toy_recipe, toy_corpus, CPU)
    with torch.no_grad():
        trainer.model.norm.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="expected a finite loss, got nan at step 1"):
        trainer.run(1)


# ------------------------------------------------------------------------------------------------------- checkpoints
def random_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(300, 70, generator=generator),
        "b": torch.randn(1000, generator=generator).to(torch.bfloat16),
        "step": torch.tensor(7.0),
        "odd": torch.tensor([float("nan"), float("inf"), -0.0]),
        "none": torch.zeros(0, 4),
    }


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_checkpoints_keep_every_bit_in_small_files(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 20_000)
    tensors = random_tensors()
    place = save_checkpoint(tmp_path, 12, tensors, {"x": [1.5]})
    loaded, state = load_checkpoint(place)
    assert state == {"x": [1.5]} and loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(bits(loaded[name]), bits(tensor))
    sizes = [path.stat().st_size for path in place.glob("part-*")]
    assert len(sizes) > 3 and max(sizes) == 20_000
    assert sum(sizes) < 0.95 * sum(t.nbytes for t in tensors.values())


def test_the_latest_complete_checkpoint_counts(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    first = save_checkpoint(tmp_path, 5, random_tensors(), {})
    second = save_checkpoint(tmp_path, 10, random_tensors(), {})
    assert not first.exists() and latest_checkpoint(tmp_path) == second
    (tmp_path / "step-000015").mkdir()  # begun, not finished
    assert latest_checkpoint(tmp_path) == second


def test_a_damaged_checkpoint_is_refused(tmp_path):
    place = save_checkpoint(tmp_path, 5, random_tensors(), {})
    path = place / "part-00.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="part-00.bin: expected a file of hash"):
        load_checkpoint(place)
    path.unlink()
    with pytest.raises(CheckpointError, match="got 0 other bytes"):
        load_checkpoint(place)


@pytest.mark.parametrize("cut", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"\xff" + data,
                                 lambda data: b"[]", lambda data: data.replace(b'"float32"', b'"float99"'),
                                 lambda data: data.replace(b"[300, 70]", b"[300, 71]")])  # fmt: skip
def test_a_damaged_table_is_named(tmp_path, cut):
    place = save_checkpoint(tmp_path, 5, random_tensors(), {})
    table = place / "checkpoint.json"
    table.write_bytes(cut(table.read_bytes()))
    with pytest.raises(CheckpointError, match=f"{table}: expected the table of a checkpoint, got .*remove {place}"):
        load_checkpoint(place)


def test_the_latest_is_that_of_the_highest_step(tmp_path):
    notes = tmp_path / "step-notes"
    notes.mkdir()
    first = save_checkpoint(tmp_path, 999_999, random_tensors(), {})
    kept = tmp_path / "kept"
    first.rename(kept)
    second = save_checkpoint(tmp_path, 1_000_000, random_tensors(), {})
    kept.rename(first)
    assert latest_checkpoint(tmp_path) == second and notes.is_dir()


# ----------------------------------------------------------------------------------------------------------- presets
def test_presets_have_the_structure_of_k2_and_fit_the_budget():
    for config in (NANO_CONFIG, CPU_CONFIG):
        assert config.q_lora_rank and config.use_router_bias and config.scoring_func == "sigmoid"
        assert config.first_k_dense_replace == 1 and config.norm_topk_prob and config.tie_word_embeddings
    assert (NANO_CONFIG.n_routed_experts, NANO_CONFIG.num_experts_per_tok) == (64, 4)
    num_parameters = sum(p.numel() for p in PlainModel(NANO_CONFIG).parameters())
    assert 2 * (num_parameters + 2_900_000) < 26 * 2**20  # with a drafter of that size
    for preset in PRESETS.values():
        assert max(preset.recipe.context_cycle) <= preset.config.max_position_embeddings


@pytest.mark.parametrize("field", ["num_steps", "batch_tokens"])
def test_an_empty_recipe_is_refused(field):
    with pytest.raises(ValueError, match=f"recipe: {field}: expected at least 1, got 0"):
        Recipe(**{"num_steps": 1, "batch_tokens": 1, "context_cycle": (8,), field: 0})
