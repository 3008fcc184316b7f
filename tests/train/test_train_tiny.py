"""Training of tiny: the plain model equals the reference, a short run learns, the record belongs to the weights."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from kdtree_nb.config import ModelConfig
from kdtree_nb.kdtr import Bf16, open_kdtr
from kdtree_nb.reference import ReferenceModel
from kdtree_nb.train.corpus import Document, build_corpus, is_heldout, save_corpus
from kdtree_nb.train.muon import Muon, orthogonalise
from kdtree_nb.train.optimizers import lr_share
from kdtree_nb.train.plain_layers import rope, rope_table
from kdtree_nb.train.plain_model import PlainModel, export_tensors, import_tensors
from kdtree_nb.train.streams import measure, sample_windows
from kdtree_nb.train.train_tiny import TINY_CONFIG, Recipe, main
from tests.train.shared import random_model

DATA = Path(__file__).parents[2] / "data"
SMALL = dataclasses.replace(
    TINY_CONFIG, hidden_size=48, kv_lora_rank=24, qk_nope_head_dim=12, qk_rope_head_dim=6, v_head_dim=10,
    intermediate_size=40, moe_intermediate_size=20, n_routed_experts=5, num_hidden_layers=3,
)  # fmt: skip


@pytest.fixture(scope="module")
def byte_corpus(tmp_path_factory):
    """A corpus of simple lines, so that a few steps learn something."""
    names = [f"module_{i}.py" for i in range(200)]
    kept = [n for n in names if not is_heldout(n)][:12] + [n for n in names if is_heldout(n)][:2]
    path = tmp_path_factory.mktemp("corpus") / "corpus.kdtr"
    save_corpus(path, build_corpus([Document(n, b"value = first + second\n" * 100) for n in kept]))
    return path


# -------------------------------------------------------------------------------------------------------- the model
@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("num_shared", [1, 2])
def test_plain_model_equals_reference(renormalise, num_shared):
    config = dataclasses.replace(
        SMALL, norm_topk_prob=renormalise, n_shared_experts=num_shared, routed_scaling_factor=1.5
    )
    model = random_model(config)
    tokens = np.random.default_rng(3).integers(0, 256, 40)
    weights = export_tensors(model)
    with torch.no_grad():
        logits = model.double()(torch.from_numpy(tokens)[None], torch.float64)[0][0].numpy()
    want = ReferenceModel(config, weights).logits(tokens.tolist())
    assert np.abs(logits - want).max() <= 1e-9 * np.abs(want).max()


def test_rope_turns_first_half_with_second_half():
    x = torch.zeros(1, 4, 1, 6, dtype=torch.float64)
    x[..., 1] = 1.0
    cos, sin = rope_table(4, 6, 100.0, like=x)
    angle = torch.arange(4, dtype=torch.float64) * 100.0 ** (-2 / 6)
    want = torch.zeros_like(x)
    want[0, :, 0, 1], want[0, :, 0, 4] = angle.cos(), angle.sin()
    torch.testing.assert_close(rope(x, cos, sin), want)


def test_export_and_import_are_inverse():
    model, other = random_model(SMALL, 0), random_model(SMALL, 1)
    tensors = export_tensors(model)
    import_tensors(other, tensors)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
    assert tensors["model.layers.1.mlp.experts.4.down_proj.weight"].shape == (48, 20)
    assert tensors["model.layers.1.mlp.gate.weight"].shape == (5, 48)
    assert tensors["model.layers.0.self_attn.kv_b_proj.weight"].shape == (4 * (12 + 10), 24)
    del tensors["model.norm.weight"]
    with pytest.raises(KeyError, match="model.norm.weight"):
        import_tensors(other, tensors)


def test_balance_loss_is_smallest_when_experts_share_the_work():
    model = random_model(SMALL)
    moe = model.layers[1].mlp
    x = torch.randn(1, 400, SMALL.hidden_size)
    _, load, balance = moe(x)
    assert load.sum().item() == pytest.approx(1.0) and balance.item() > 1.0
    with torch.no_grad():
        moe.gate.weight[0] = 0.0
        moe.gate.weight[1:] = moe.gate.weight[1:] * 0 - 1
    _, skewed_load, skewed = moe(x.abs())
    assert skewed_load[0].item() == 0.5 and skewed.item() > balance.item()


# ---------------------------------------------------------------------------------------------------------- training
def test_orthogonalise_brings_singular_values_near_one():
    matrices = torch.randn(3, 8, 20, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices))
    assert values.min() > 0.5 and values.max() < 1.5


def test_muon_treats_stacked_matrices_as_independent():
    generator = torch.Generator().manual_seed(1)
    start, grad = (torch.randn(3, 6, 4, generator=generator) for _ in range(2))
    stacked = torch.nn.Parameter(start.clone())
    stacked.grad = grad.clone()
    Muon([stacked], lr=0.1).step()
    for i in range(3):
        single = torch.nn.Parameter(start[i].clone())
        single.grad = grad[i].clone()
        Muon([single], lr=0.1).step()
        torch.testing.assert_close(single.data, stacked.data[i])
    assert not torch.allclose(stacked.data, start)


def test_muon_reaches_the_minimum_of_a_quadratic():
    target = torch.randn(5, 9, generator=torch.Generator().manual_seed(2))
    weight = torch.nn.Parameter(torch.zeros(5, 9))
    optimizer = Muon([weight], lr=0.1, weight_decay=0.0)
    for step in range(200):
        optimizer.param_groups[0]["lr"] = 0.1 * (1 - step / 200)
        weight.grad = weight.detach() - target
        optimizer.step()
    assert (weight.detach() - target).norm() < 0.1 * target.norm()


def test_learning_rate_warms_up_and_falls():
    recipe = Recipe(num_steps=1000)
    shares = [lr_share(step, 1000, recipe.warmup_share, recipe.final_lr_share) for step in range(1000)]
    peak = int(np.argmax(shares))
    assert shares[0] < 0.05 and 20 <= peak <= 40 and shares[peak] > 0.95
    assert all(a > b for a, b in zip(shares[peak:], shares[peak + 1 :], strict=False))
    assert shares[-1] == pytest.approx(recipe.final_lr_share)


def test_windows_are_pieces_of_the_stream_and_depend_on_the_seed():
    stream = torch.arange(200, dtype=torch.uint8)
    draw = [sample_windows(stream, 50, 10, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert torch.equal(draw[0], draw[1]) and not torch.equal(draw[0], draw[2])
    assert torch.equal(draw[0] - draw[0][:, :1], torch.arange(10).expand(50, 10))
    with pytest.raises(ValueError, match="expected a stream of at least 201 tokens, got 200"):
        sample_windows(stream, 1, 201, torch.Generator())


def test_measure_of_a_uniform_model_is_eight_bits():
    model = random_model(SMALL)
    torch.nn.init.zeros_(model.lm_head.weight)
    bits, load = measure(model, torch.arange(100, dtype=torch.uint8), torch.float32, max_windows=3, context=20)
    assert bits == pytest.approx(8.0, abs=1e-5)
    assert np.array(load).shape == (2, 5) and np.allclose(np.sum(load, 1), 1.0)
    with pytest.raises(ValueError, match="more than 100 tokens, got 100"):
        measure(model, torch.arange(100, dtype=torch.uint8), torch.float32, 1, context=100)


def test_short_run_learns_and_writes_weights_and_record(tmp_path, byte_corpus):
    arguments = ["--steps", "3", "--batch-bytes", "512", "--eval-windows", "1", "--sample-bytes", "2"]
    for name in ("a", "b"):
        main(["--out", str(tmp_path / f"{name}.kdtr"), "--corpus", str(byte_corpus), "--seed", "7", *arguments])
    file = open_kdtr(tmp_path / "a.kdtr")
    file.verify()
    assert ModelConfig.from_dict(file.metadata["config"]) == TINY_CONFIG
    assert {file.dtype(name) for name in file.names} == {"bf16"}
    assert set(file.names) == set(export_tensors(PlainModel(TINY_CONFIG)))
    record = json.loads((tmp_path / "a_training.json").read_text())
    curve = [point["bits_per_byte"] for point in record["train_curve"]]
    assert 8 < curve[0] < 12 and curve[-1] < curve[0] - 3  # a start that knows nothing, then a simple text
    assert record["final"]["heldout_bits_per_byte"] < 6
    assert record["seed"] == 7 and "--seed 7 --steps 3" in record["command"]
    assert record["corpus"] == open_kdtr(byte_corpus).metadata["corpus"]
    again = open_kdtr(tmp_path / "b.kdtr")
    assert all(np.array_equal(file.array(name), again.array(name)) for name in file.names)


@pytest.mark.parametrize("flag", ["--steps", "--batch-bytes"])
def test_bad_arguments_are_refused(tmp_path, flag, capsys):
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path / "x.kdtr"), flag, "0"])
    assert "expected at least 1" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ the committed files
def test_committed_record_belongs_to_the_committed_weights():
    file = open_kdtr(DATA / "tiny.kdtr")
    file.verify()
    record = json.loads((DATA / "tiny_training.json").read_text())
    assert all(record[key] == value for key, value in file.metadata["made_by"].items())
    assert ModelConfig.from_dict(file.metadata["config"]) == TINY_CONFIG
    assert f"--steps {Recipe.num_steps} --batch-bytes {Recipe.batch_bytes}" in record["command"]
    assert record["recipe"] == json.loads(json.dumps(dataclasses.asdict(Recipe(seed=record["seed"]))))
    assert sum(math.prod(file.shape(name)) for name in file.names) == record["num_parameters"]
    assert record["final"]["heldout_bits_per_byte"] < 1.3
    load = np.array(record["final"]["expert_load"])
    assert load.shape == (3, 8) and load.min() > 0.5 / 8 and load.max() < 2 / 8


def test_committed_weights_predict_our_prompts():
    """tiny knows Python text: far below 8 bits per byte on text that it has never seen."""
    file = open_kdtr(DATA / "tiny.kdtr")
    model = PlainModel(TINY_CONFIG)
    import_tensors(model, {name: file.float32(name) for name in file.names})
    assert all(np.array_equal(Bf16.round(a).float32(), a) for a in export_tensors(model).values())
    prompts = json.loads((DATA / "prompts.json").read_text())["prompts"]
    text = "\0".join(p["text"] for p in prompts if p["kind"] == "code").encode()
    bits, _ = measure(model, torch.frombuffer(bytearray(text), dtype=torch.uint8), torch.float32, 1, context=1024)
    assert bits < 1.6


def test_committed_prompts_are_many_named_and_of_stated_sizes():
    prompts = json.loads((DATA / "prompts.json").read_text())["prompts"]
    assert len({p["name"] for p in prompts}) == len(prompts) == len({p["text"] for p in prompts})
    for prompt in prompts:
        low, high = (300, 800) if prompt["kind"] == "repetitive" else (60, 400)
        assert low <= len(prompt["text"].encode()) <= high, prompt["name"]
    kinds = [p["kind"] for p in prompts]
    assert set(kinds) == {"code", "docstring", "mixed", "repetitive"}
    assert kinds.count("repetitive") >= 3 and len(kinds) - kinds.count("repetitive") >= 12


def test_data_readme_states_the_checksums():
    readme = (DATA / "README.md").read_text()
    for name in ("tiny.kdtr", "tiny_training.json", "prompts.json", "nano-k2/corpus.json", "nano-k2/tokenizer.json"):
        assert hashlib.sha256((DATA / name).read_bytes()).hexdigest() in readme, name
