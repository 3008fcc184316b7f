"""Errors amid steps that the device takes: what is in flight comes to an end, and the engine goes on working."""

from __future__ import annotations

import pytest
import torch

from kdtree_nb import drafters
from kdtree_nb.errors import NonFiniteError
from kdtree_nb.model import build_model
from kdtree_nb.speculate.device_batch import LOOKAHEAD, DeviceBatch
from kdtree_nb.tiny2 import tiny2_config, tiny2_weights
from tests.speculate.shared import NUM_TOKENS, Broken, device_engine


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_logits_of_a_drafter_on_the_device(tiny2, prompts, ar, skip_gram, bad):
    """They name the stream and the position, where the stream has come to by then."""

    def fill(logits, state):
        logits[1, 1].masked_fill_(state.remaining[1] == 3, bad)

    engine = device_engine(tiny2, Broken(2, (3, 2, 331), fill), budget=4)
    position = len(prompts["tiny2"][1]) + 5 + 1
    with pytest.raises(NonFiniteError, match=f"draft: Broken: stream 1: .* position {position} hold a NaN"):
        engine.generate_ddtree(prompts["tiny2"], 8, stop_token_ids=())
    engine.drafter = skip_gram
    got = engine.generate_ddtree(prompts["tiny2"], NUM_TOKENS, stop_token_ids=())
    assert [g.tokens for g in got] == [w.tokens for w in ar("tiny2")]


def test_nan_logits_of_a_drafter_end_their_stream_alone(tiny2, prompts, ar):
    """Two of three streams, at different places, and what lies in a free seat; each is told of its own."""
    counts, wanted = (20, 12, 20), prompts["tiny2"]
    ends = [len(prompt) + count - 1 for prompt, count in zip(wanted, counts, strict=True)]
    assert len(set(ends)) == 3

    def fill(logits, state):
        for end, remaining in ((ends[0], 5), (ends[1], 9)):
            is_bad = (state.prefix_len + state.remaining == end) & (state.remaining <= remaining)
            logits[:, 1].masked_fill_(is_bad[:, None], torch.nan)
        logits[3].fill_(torch.nan)

    engine = device_engine(tiny2, Broken(2, (4, 2, 331), fill), budget=4, max_streams=4)
    handles = [engine.submit(p, n, stop_token_ids=()) for p, n in zip(wanted, counts, strict=True)]
    engine.run()
    texts = [want.tokens for want in ar("tiny2")]
    assert handles[2].result().tokens == texts[2][:20]
    for index, num_tokens in ((0, 15), (1, 3)):
        assert handles[index].tokens == texts[index][:num_tokens]
        position = len(wanted[index]) + num_tokens + 1
        with pytest.raises(NonFiniteError, match=f"Broken: stream {index}: .* position {position} hold a NaN"):
            handles[index].result()


@pytest.mark.parametrize("shape", [(1, 2, 330), (1, 3, 331), (2, 2, 331)])
def test_logits_of_another_shape(tiny2, prompts, ar, shape):
    engine = device_engine(tiny2, Broken(2, shape, lambda logits, state: None))
    with pytest.raises(ValueError, match=r"draft: Broken: expected logits \[S, L, V\] = \[1, 2, 331\], got "):
        engine.generate_ddtree(prompts["tiny2"][0], 8)
    assert engine.generate_ar(prompts["tiny2"][0], 8, stop_token_ids=()).tokens == ar("tiny2")[0].tokens[:8]


@pytest.mark.parametrize("drafting", ["ar", "drafter on the device", "drafter on the host"])
def test_nan_logits_amid_the_text(poisonous, prompts, ar, skip_gram, drafting):
    """The steps in flight come to an end, the error is that of the host's steps, the engine goes on working."""
    (model, token), want = poisonous, ar("tiny2")[0].tokens
    prompt = prompts["tiny2"][0]
    assert token not in prompt
    place = want.index(token)
    drafter = {"ar": None, "drafter on the device": skip_gram}.get(drafting, drafters.Oracle(want))
    engine = device_engine(model, drafter)
    budget = 0 if drafting == "ar" else 16
    with pytest.raises(NonFiniteError, match=f"verify: stream 0: .* position {len(prompt) + place} hold a NaN"):
        engine.generate_ddtree(prompt, NUM_TOKENS, budget=budget, stop_token_ids=())
    got = engine.generate_ddtree(prompt, place + 1, budget=budget, stop_token_ids=())
    assert got.tokens == want[: place + 1]


def test_weights_that_turn_nan_between_steps(prompts, device):
    """A captured step reads the weights where they lie."""
    model = build_model(tiny2_config(), tiny2_weights(), device)
    good = model.norm.clone()
    engine = device_engine(model)
    want = engine.generate_ar(prompts["tiny2"][0], 8, stop_token_ids=()).tokens

    def spoil(record):
        if record.step == 3:
            model.norm.fill_(torch.nan)

    with pytest.raises(NonFiniteError, match="verify: stream 0: the target's logits"):
        engine.generate_ar(prompts["tiny2"][0], 8, stop_token_ids=(), on_step=spoil)
    with torch.inference_mode():
        model.norm.copy_(good)
    assert engine.generate_ar(prompts["tiny2"][0], 8, stop_token_ids=()).tokens == want


def test_an_error_of_the_caller_waits_for_the_steps_in_flight(tiny2, prompts, ar, calls):
    engine = device_engine(tiny2)

    def interrupt(*args):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(DeviceBatch, "emit", interrupt)
        engine.generate_ar(prompts["tiny2"][0], 8)
    assert calls == ["launch"] * LOOKAHEAD + ["wait"] * LOOKAHEAD and engine._spares == []
    assert engine.generate_ar(prompts["tiny2"][0], 8, stop_token_ids=()).tokens == ar("tiny2")[0].tokens[:8]
