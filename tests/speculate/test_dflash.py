"""DFlash in the engine: tokens and bits of AR whatever it drafts, and for each stream the drafts that it gets alone."""

from __future__ import annotations

import pytest
import torch

from kdtree_nb import Engine, ops
from kdtree_nb.drafters import DeviceDrafter, DFlash, DFlashConfig, DraftContext
from kdtree_nb.drafters.dflash.weights import random_weights
from kdtree_nb.errors import NonFiniteError
from kdtree_nb.native.ops import StreamState
from tests.speculate.shared import NUM_TOKENS

LAYERS = {"tiny": (0, 2), "tiny2": (4, 1)}


def drafter_for(model, name, mask_token_id=255, **options):
    """An untrained drafter."""
    c = model.config
    config = DFlashConfig(
        hidden_size=c.hidden_size, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=c.vocab_size, target_layer_ids=LAYERS[name],
        mask_token_id=mask_token_id, block_size=8, windows=(None, 9),
    )  # fmt: skip
    return DFlash(config, random_weights(config), **options)


def check(got, want):
    for g, w in zip(got, want, strict=True):
        assert g.tokens == w.tokens[: len(g.tokens)]
        assert torch.equal(g.logits, w.logits[: len(g.tokens)])  # false on NaN


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("budget", [0, 1, 7, 33, 64])
@pytest.mark.parametrize("name", ["tiny", "tiny2"])
def test_exact(models, name, budget, dtype, ar, prompts):
    model, want = models(name, dtype), ar(name, dtype)
    engine = Engine(model, drafter_for(model, name), budget=budget)
    options = {"return_logits": True, "stop_token_ids": ()}
    got = engine.generate_ddtree(prompts[name], NUM_TOKENS, **options)
    check(got, want)
    check([engine.generate_ddtree(prompts[name][1], NUM_TOKENS, **options)], want[1:2])


def test_the_mask_token_is_a_token_like_others(tiny2, ar, prompts):
    """A target that writes the drafter's mask token, one that reads it in the prompt, and a draft of it."""
    want = ar("tiny2")[0].tokens
    for mask in {want[0], want[7], prompts["tiny2"][0][-1]}:
        engine = Engine(tiny2, drafter_for(tiny2, "tiny2", mask), budget=16)
        assert engine.generate_ddtree(prompts["tiny2"][0], NUM_TOKENS, stop_token_ids=()).tokens == want
        got = engine.generate_ddtree([mask] * 3, 12, stop_token_ids=())
        assert got.tokens == engine.generate_ar([mask] * 3, 12, stop_token_ids=()).tokens


def test_a_batch_that_shrinks(tiny2, prompts, ar):
    """Each stream's trees are those that it gets alone, whoever it is decoded beside."""
    order, counts = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0], [24, 5, 4, 6, 14, 3, 5, 4, 12, 6]
    budget = [16, 3, 0, 16, 7, 1, 16, 16, 2, 5]
    engine = Engine(tiny2, drafter_for(tiny2, "tiny2"))
    texts = [prompts["tiny2"][i] for i in order]
    got = engine.generate_ddtree(texts, counts, budget=budget, stop_token_ids=())
    for text, g, i, count, nodes in zip(texts, got, order, counts, budget, strict=True):
        assert g.tokens == ar("tiny2")[i].tokens[:count]
        alone = engine.generate_ddtree(text, count, budget=nodes, stop_token_ids=())
        assert alone.stats.accepted_per_step == g.stats.accepted_per_step


@pytest.mark.parametrize("length", [1, 2, 9])
@pytest.mark.parametrize("room", [1, 2, 7, 20])
def test_the_end_of_the_sequence(tiny2, prompts, length, room):
    prompt = prompts["tiny2"][0][:length]
    want = Engine(tiny2, max_seq_len=length + room).generate_ar(prompt, 50, stop_token_ids=())
    for budget in (1, 16):
        engine = Engine(tiny2, drafter_for(tiny2, "tiny2"), budget=budget, max_seq_len=length + room)
        got = engine.generate_ddtree(prompt, 50, stop_token_ids=())
        assert got.tokens == want.tokens and got.finish_reason == want.finish_reason == "max_seq_len"


def test_one_drafter_in_several_engines_and_dtypes(models, prompts, ar):
    drafter = drafter_for(models("tiny2"), "tiny2")
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        engine = Engine(models("tiny2", dtype), drafter)
        got = engine.generate_ddtree(prompts["tiny2"], NUM_TOKENS, stop_token_ids=())
        assert [g.tokens for g in got] == [w.tokens for w in ar("tiny2", dtype)]


def test_a_text_does_not_depend_on_the_one_before(tiny2, prompts, ar):
    engine = Engine(tiny2, drafter_for(tiny2, "tiny2"), budget=16)
    first = engine.generate_ddtree(prompts["tiny2"][0], NUM_TOKENS, stop_token_ids=())
    engine.generate_ddtree(prompts["tiny2"][1], NUM_TOKENS, stop_token_ids=())
    again = engine.generate_ddtree(prompts["tiny2"][0], NUM_TOKENS, stop_token_ids=())
    assert again.tokens == first.tokens == ar("tiny2")[0].tokens
    assert again.stats.accepted_per_step == first.stats.accepted_per_step


@pytest.mark.parametrize("mode", ["chain", "tree"])
def test_part_of_a_block(tiny2, prompts, ar, mode):
    drafter = drafter_for(tiny2, "tiny2", block_size=6, depth=3)
    engine = Engine(tiny2, drafter, budget=16, mode=mode)
    got = engine.generate_ddtree(prompts["tiny2"], NUM_TOKENS, stop_token_ids=())
    assert [g.tokens for g in got] == [w.tokens for w in ar("tiny2")]
    assert max(max(g.stats.accepted_per_step) for g in got) <= 3
    assert max(max(g.stats.nodes_per_step) for g in got) <= (4 if mode == "chain" else 17)


def test_it_drafts_on_the_device_what_it_drafts_on_the_host(tiny2):
    """Logits of the streams together, behind contexts of different lengths, and of some of them."""
    drafter = drafter_for(tiny2, "tiny2").attach(tiny2, 3, 40)
    assert isinstance(drafter, DeviceDrafter)
    generator, device = torch.Generator().manual_seed(0), tiny2.device
    text = torch.randint(0, 331, (3, 40), generator=generator).to(device)
    prefix_len = torch.tensor([17, 0, 39], dtype=torch.int32, device=device)
    position = torch.arange(40, dtype=torch.int32, device=device)
    for row in range(3):
        states = torch.randn(40, 2 * 192, generator=generator).to(device)
        known = torch.where(position < prefix_len[row], position, -1)
        drafter.remember(states, torch.full_like(position, row), known)
    bonus = text.gather(1, prefix_len[:, None].long())[:, 0]
    one = torch.ones(3, dtype=torch.int32, device=device)
    logits = drafter.draft_on_device(StreamState(prefix_len, bonus, one, one, text))
    want = ops.draft_topk(logits, 5)
    for rows in ([0, 1, 2], [2, 0], [1]):
        tokens = [text[row, : prefix_len[row] + 1].tolist() for row in rows]
        got = drafter.draft(DraftContext(tokens, rows, [1] * len(rows), 5, 331, device))
        assert torch.allclose(got.log_probs, want[0][rows], atol=1e-4)
        assert (got.token_ids == want[1][rows]).float().mean() > 0.95


def test_a_context_that_is_nan_ends_one_stream(tiny2, prompts, ar):
    """What was remembered of one text overflows: that stream's handle says so, and the others go on."""
    engine = Engine(tiny2, drafter_for(tiny2, "tiny2"), budget=6)
    handles = [engine.submit(p, 12, stop_token_ids=()) for p in prompts["tiny2"]]
    while min(handle.num_tokens for handle in handles) < 2:
        engine.step()
    assert not any(handle.is_finished for handle in handles)
    reader = engine._streams._batch.forward.features.reader
    with torch.inference_mode():
        reader.contexts.values[handles[1].stream.seat, 0] = torch.nan
    engine.run()
    with pytest.raises(NonFiniteError, match="DFlashStreams: stream 1: the log-probs for position .* hold a NaN"):
        handles[1].result()
    for i in (0, 2):
        assert handles[i].result().tokens == ar("tiny2")[i].tokens[:12]


def test_weights_that_are_nan(tiny2, prompts, ar):
    drafter = drafter_for(tiny2, "tiny2")
    drafter.weights["norm.weight"] = torch.full_like(drafter.weights["norm.weight"], torch.nan)
    engine = Engine(tiny2, drafter)
    with pytest.raises((ValueError, NonFiniteError), match="expected logits|DFlashStreams"):
        engine.generate_ddtree(prompts["tiny2"][0], 8, stop_token_ids=())
    engine.drafter = drafter_for(tiny2, "tiny2")
    assert engine.generate_ddtree(prompts["tiny2"][0], 8, stop_token_ids=()).tokens == ar("tiny2")[0].tokens[:8]
