"""The training of a drafter: the network that is trained is the one that drafts; runs that repeat, stop and go on."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from kdtree_nb import Engine, drafters, load_model
from kdtree_nb.errors import CheckpointError
from kdtree_nb.kdtr import open_kdtr
from kdtree_nb.model.checkpoint import DATA_DIR
from kdtree_nb.speculate.text_logits import text_logits
from kdtree_nb.train.checkpoint import MAX_FILE_BYTES
from kdtree_nb.train.drafter.network import DrafterNetwork
from kdtree_nb.train.drafter.recipe import MIXED_SIZES, PRESETS, Recipe, Shape, default_layers
from kdtree_nb.train.drafter.target import engine_target, fast_dtype, plain_target
from kdtree_nb.train.drafter.trainer import Texts, Trainer, block_loss, sample_blocks
from kdtree_nb.train.plain_model import PlainModel, import_tensors

SHAPE = Shape(num_layers=2, width=48, num_heads=4, num_kv_heads=2, head_dim=12, num_features=2, block_size=6)
MASK = 255
TEXT_TOKENS = 80


@pytest.fixture(scope="module")
def tiny():
    return load_model("tiny")


@pytest.fixture(scope="module")
def texts(tiny) -> Texts:
    """What tiny writes behind beginnings of this file, 16, 24 or 32 tokens long."""
    with open(__file__, "rb") as file:
        source = list(file.read())
    lengths = [16, 24, 32] * 8
    prompts = [source[211 * i :][:n] for i, n in enumerate(lengths)]
    got = Engine(tiny).generate_ar(prompts, [TEXT_TOKENS - n for n in lengths], stop_token_ids=())
    tokens = torch.tensor([p + g.tokens for p, g in zip(prompts, got, strict=True)])
    return Texts(tokens, torch.tensor(lengths), "the tests' own")


def trainer_for(tiny, texts, shape=SHAPE, keep_features=True, dtype=torch.float32, **recipe):
    config = shape.config(tiny.config, MASK)
    fields = {"num_steps": 12, "batch_texts": 4, "anchors": 6, "block_sizes": (6, 6, 3)} | recipe
    return Trainer(config, Recipe(**fields), engine_target(tiny, config.target_layer_ids, dtype), texts, keep_features)


KINDS = {
    "full": {},
    "window": {"windows": (9, 9)},
    "sliding": {"windows": (None, 5), "causal": (False, True)},
    "one head each": {"num_key_value_heads": 4},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [6, 4, 2])
def test_the_network_gives_the_logits_of_the_drafter(tiny, texts, kind, size):
    """Many blocks at once, some of them short, give what one block at a time gives of that size."""
    config = dataclasses.replace(SHAPE.config(tiny.config, MASK), **KINDS[kind])
    torch.manual_seed(0)
    network = DrafterNetwork(config)
    for name, value in network.named_parameters():
        torch.nn.init.normal_(value, mean=1.0 if "norm" in name else 0.0, std=0.2 if "norm" in name else 0.06)
    target = engine_target(tiny, config.target_layer_ids)
    anchor = torch.tensor([[0, 1, 17, 40, TEXT_TOKENS - 1]] * 2)
    tokens = texts.tokens[:2]
    sizes = torch.tensor([[6, 2, 5, 6, 3], [6, 6, 2, 2, 2]])
    sizes[:, 1::2] = size
    with torch.no_grad():
        hidden = network(target.features(tokens), target.embedding, tokens.gather(1, anchor), anchor, sizes)
        logits = hidden @ target.head.T
    drafter = drafters.DFlash(config, network.state_dict(), block_size=size)
    for row in range(2):
        got = text_logits(drafter, tiny, tokens[row].tolist(), anchor[row].tolist())
        want = logits[row, :, : size - 1]
        assert (got[1::2] - want[1::2]).abs().max() < 1e-3 * want.abs().max()


def test_hidden_states_of_both_kinds_of_target(tiny, texts):
    file = open_kdtr(DATA_DIR / "tiny.kdtr")
    plain = PlainModel(tiny.config)
    import_tensors(plain, {name: file.float32(name) for name in file.names})
    a, b = engine_target(tiny, (2, 0)), plain_target(plain.requires_grad_(False), (2, 0), torch.float32)
    for one, other in (
        (a.embedding, b.embedding),
        (a.head, b.head),
        (a.features(texts.tokens[:2]), b.features(texts.tokens[:2])),
    ):
        assert one.shape == other.shape and not one.requires_grad and not other.requires_grad
        assert torch.allclose(one, other, atol=1e-3 * one.abs().max().item())
    assert torch.equal(a.embedding, b.embedding) and torch.equal(a.head, b.head)


def test_blocks_are_what_follows_their_anchors(texts):
    recipe = Recipe(num_steps=1, anchors=500, block_sizes=(2, 4, 16), gamma=3.0)
    blocks = sample_blocks(texts.tokens, texts.prompt_len, recipe, 6, torch.Generator().manual_seed(0))
    tokens, first = texts.tokens.tolist(), texts.prompt_len[:, None] - 1
    assert (blocks.anchor >= first).all() and (blocks.anchor <= TEXT_TOKENS - 2).all()
    assert (blocks.anchor == first).any() and (blocks.anchor == TEXT_TOKENS - 2).any()
    assert sorted(blocks.size.unique().tolist()) == [2, 4, 6]
    for row in (0, 5):
        for anchor, bonus, size, target, weight in zip(*(field[row].tolist() for field in (
            blocks.anchor, blocks.bonus, blocks.size, blocks.target, blocks.weight)), strict=True):  # fmt: skip
            assert bonus == tokens[row][anchor]
            for k in range(1, 6):
                if k < size and anchor + k < TEXT_TOKENS:
                    assert target[k - 1] == tokens[row][anchor + k]
                    assert weight[k - 1] == pytest.approx(math.exp(-(k - 1) / 3.0))
                else:
                    assert weight[k - 1] == 0


def test_the_loss_is_a_weighted_mean():
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(2, 3, 4, 8, generator=generator), torch.randn(11, 8, generator=generator)
    target, weight = torch.randint(0, 11, (2, 3, 4), generator=generator), torch.rand(2, 3, 4, generator=generator)
    weight[0, 0, 1:] = 0
    loss, nats = block_loss(hidden, head, target, weight)
    total = 0.0
    for index in np.ndindex(2, 3, 4):
        logits = (head.double() @ hidden[index].double()).numpy()
        value = np.log(np.exp(logits).sum()) - logits[target[index]]
        assert nats[index].item() == pytest.approx(value, abs=1e-5)
        total += value * weight[index].item()
    assert loss.item() == pytest.approx(total / weight.sum().item(), abs=1e-5)


def test_a_run_repeats_itself_and_another_seed_does_not(tiny, texts):
    curves = []
    for seed, keep_features in ((0, True), (0, False), (1, True)):
        trainer = trainer_for(tiny, texts, keep_features=keep_features, seed=seed)
        trainer.run(5)
        curves.append([point["nats_per_token"] for point in trainer.train_curve])
    assert curves[0] == curves[1] != curves[2] and len(curves[0]) == 5


def test_activations_of_bfloat16_learn_about_the_same(tiny, texts):
    curves = []
    for dtype in (torch.float32, torch.bfloat16):
        trainer = trainer_for(tiny, texts, dtype=dtype, num_steps=20)
        trainer.run(20)
        assert {value.dtype for value in trainer.network.state_dict().values()} == {torch.float32}
        curves.append([point["nats_per_token"] for point in trainer.train_curve])
    assert curves[0] != curves[1] and abs(np.mean(curves[0][-8:]) - np.mean(curves[1][-8:])) < 0.3
    assert fast_dtype(torch.device("cuda")) == torch.bfloat16


def test_losses_by_depth_are_those_of_whole_blocks(tiny, texts):
    trainer = trainer_for(tiny, texts, block_sizes=(6,), num_steps=1)
    trainer.loss = lambda *args: (block_loss(*args)[0], torch.arange(5.0).expand(4, 6, 5).clone())
    trainer.run(1)
    assert trainer.train_curve[0]["by_depth"] == [0.0, 1.0, 2.0, 3.0, 4.0]
    short = trainer_for(tiny, texts, block_sizes=(3,), num_steps=1)
    short.run(1)
    assert short.train_curve[0]["by_depth"] == [None] * 5


def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(tiny, texts, tmp_path):
    whole = trainer_for(tiny, texts, num_steps=6)
    whole.run(6)
    first = trainer_for(tiny, texts, num_steps=6)
    assert not first.resume(tmp_path)
    first.run(4, tmp_path, every=3)
    assert all(path.stat().st_size <= MAX_FILE_BYTES for path in tmp_path.rglob("*"))
    second = trainer_for(tiny, texts, num_steps=6)
    assert second.resume(tmp_path) and second.step == 4
    second.run(6)
    assert second.train_curve == whole.train_curve
    for name, value in whole.network.state_dict().items():
        assert torch.equal(second.network.state_dict()[name], value)
    for change in ({"seed": 1}, {"gamma": 2.0}, {"shape": dataclasses.replace(SHAPE, width=32)}):
        with pytest.raises(CheckpointError, match="resume: .*: (recipe|config): expected"):
            trainer_for(tiny, texts, **{"num_steps": 6} | change).resume(tmp_path)
    with pytest.raises(CheckpointError, match="texts: expected others, got the tests' own"):
        trainer_for(tiny, texts._replace(digest="others"), num_steps=6).resume(tmp_path)


@pytest.mark.parametrize("prompt_len", [0, TEXT_TOKENS])
def test_prompts_that_leave_nothing_to_learn(tiny, texts, prompt_len):
    bad = texts._replace(prompt_len=torch.full_like(texts.prompt_len, prompt_len))
    with pytest.raises(ValueError, match="train: expected texts .* with prompts of 1 … T - 1 tokens"):
        trainer_for(tiny, bad)


@pytest.mark.parametrize(
    ("field", "value"), [("num_steps", 0), ("anchors", 0), ("block_sizes", ()), ("block_sizes", (1,)), ("gamma", 0)]
)
def test_bad_recipes(field, value):
    with pytest.raises(ValueError, match=f"recipe: {field}: expected"):
        Recipe(**{"num_steps": 1, field: value})


def test_layers_that_a_drafter_sees():
    assert [default_layers(n, 3) for n in (2, 3, 4, 5, 6)] == [(0,), (0, 1), (0, 1, 2), (1, 2, 3), (1, 3, 4)]
    assert default_layers(61, 6) == (1, 13, 24, 36, 47, 59) and default_layers(6, 1) == (4,)
    with pytest.raises(CheckpointError, match="expected a target of at least 2 layers, got 1"):
        default_layers(1, 3)


def test_presets_train_every_size():
    assert set(MIXED_SIZES) == set(range(2, 17))
    for preset in PRESETS.values():
        assert max(preset.recipe.block_sizes) == preset.shape.block_size
        assert set(preset.recipe.block_sizes) == set(range(2, preset.shape.block_size + 1))


@pytest.fixture(scope="module")
def trained(tiny, texts):
    """A drafter after a few seconds: (untrained, trained)."""
    torch.set_num_threads(1)
    shape = dataclasses.replace(SHAPE, num_layers=1, width=64, num_heads=4, num_kv_heads=2, head_dim=32)
    trainer = trainer_for(tiny, texts, shape, num_steps=60, batch_texts=6, anchors=16, muon_lr=0.05, adam_lr=4e-3)
    untrained = trainer.drafter()
    untrained = drafters.DFlash(untrained.config, {name: value.clone() for name, value in untrained.weights.items()})
    trainer.run(60)
    return untrained, trainer


def chain_tau(model, drafter, texts, count):
    """Tokens per target forward of chains, over the first `count` texts. They are AR's."""
    engine, tokens = Engine(model, drafter, budget=drafter.depth, mode="chain"), texts.tokens[:count].tolist()
    prompts = [row[:n] for row, n in zip(tokens, texts.prompt_len.tolist(), strict=False)]
    got = engine.generate_ddtree(prompts, [TEXT_TOKENS - len(p) for p in prompts], stop_token_ids=())
    assert [g.tokens for g in got] == [row[len(p) :] for row, p in zip(tokens, prompts, strict=True)]
    return sum(len(g.tokens) for g in got) / sum(g.stats.num_target_forwards for g in got)


def test_training_pays(tiny, texts, trained):
    untrained, trainer = trained
    curve = [point["nats_per_token"] for point in trainer.train_curve]
    assert np.mean(curve[-10:]) < 0.6 * curve[0]
    assert chain_tau(tiny, trainer.drafter(), texts, 9) > chain_tau(tiny, untrained, texts, 9) + 0.2


@pytest.mark.parametrize("budget", [0, 1, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_trained_drafter_drafts_is_exact(trained, texts, dtype, budget):
    """The bits of AR, in a batch of texts of several lengths that shrinks."""
    model, drafter = load_model("tiny", dtype=dtype), trained[1].drafter()
    prompts = [row[:n] for row, n in zip(texts.tokens.tolist(), texts.prompt_len.tolist(), strict=True)][:5]
    counts, options = [40, 9, 31, 2, 24], {"return_logits": True, "stop_token_ids": ()}
    want = Engine(model).generate_ar(prompts, counts, **options)
    got = Engine(model, drafter, budget=budget).generate_ddtree(prompts, counts, **options)
    for g, w in zip(got, want, strict=True):
        assert g.tokens == w.tokens and torch.equal(g.logits, w.logits)
    accepted = sum(sum(g.stats.accepted_per_step) for g in got)
    assert accepted > 0 if budget else accepted == 0


def test_a_trained_drafter_is_saved_as_it_drafts(tiny, texts, trained, tmp_path):
    drafter = trained[1].drafter()
    drafter.save(tmp_path / "drafter", torch.float32)
    loaded = drafters.DFlash.load(tmp_path / "drafter")
    text, anchors = texts.tokens[0].tolist(), [20, 50]
    assert torch.equal(text_logits(loaded, tiny, text, anchors), text_logits(drafter, tiny, text, anchors))
