"""Submitted streams: when a model, a drafter or the memory fails, the others lose nothing."""

from __future__ import annotations

import pytest
import torch

from kdtree_nb import Engine, drafters
from kdtree_nb.errors import DeviceMemoryError, NonFiniteError
from kdtree_nb.speculate import engine as engine_module
from tests.speculate.shared import NUM_TOKENS, submit_all


def test_nan_logits_end_one_stream(poisonous, prompts, ar):
    model, token = poisonous
    place = ar("tiny2")[0].tokens.index(token)
    other = next(i for i in (1, 2) if token not in prompts["tiny2"][i] + ar("tiny2")[i].tokens[:NUM_TOKENS])
    engine = Engine(model, drafters.NGram())
    bad, good = submit_all(engine, [prompts["tiny2"][0], prompts["tiny2"][other]], return_logits=True)
    engine.run()
    for fails in (bad.result, lambda: list(bad)):
        with pytest.raises(NonFiniteError, match="verify: stream 0: the target's logits"):
            fails()
    assert bad.tokens == ar("tiny2")[0].tokens[: len(bad.tokens)] and len(bad.tokens) <= place + 1
    assert bad.finish_reason is None and bad.cancel() is False and repr(bad).endswith("error>")
    assert good.result().tokens == ar("tiny2")[other].tokens
    assert torch.equal(good.result().logits, ar("tiny2")[other].logits)


def test_a_drafter_that_fails_can_be_replaced(tiny2, prompts, ar, script):
    """What concerns no stream alone is raised by the step; nothing is lost."""
    calls = []

    def answer(context):
        calls.append(context)
        if len(calls) > 2:
            raise OSError("the drafter's disk is gone")
        return drafters.NGram().draft(context)

    engine = Engine(tiny2, script(answer), budget=4)
    handles = submit_all(engine, prompts["tiny2"])
    for _ in range(2):
        with pytest.raises(OSError, match="disk is gone"):
            engine.run()
    before = [len(handle.tokens) for handle in handles]
    assert all(before) and not any(handle.is_finished for handle in handles)
    engine.drafter = drafters.NGram()
    engine.run()
    assert [h.tokens for h in handles] == [g.tokens for g in ar("tiny2")]


def test_a_drafter_that_is_wrong_about_one_stream(tiny2, prompts, ar, script):
    def answer(context):
        log_probs = torch.full((len(context.tokens), 1, 1), -0.5)
        for row, (tokens, count) in enumerate(zip(context.tokens, context.num_prompt_tokens, strict=True)):
            if tokens[:count] == prompts["tiny2"][1] and len(tokens) > count + 2:
                log_probs[row] = torch.nan
        return drafters.DraftCandidates(log_probs, torch.zeros(log_probs.shape, dtype=torch.int64))

    engine = Engine(tiny2, script(answer), budget=2)
    handles = submit_all(engine, prompts["tiny2"])
    engine.run()
    with pytest.raises(NonFiniteError, match="draft: Script: stream 1: the log-probs for position"):
        handles[1].result()
    for i in (0, 2):
        assert handles[i].result().tokens == ar("tiny2")[i].tokens


def test_no_memory_for_the_first_step(tiny2, prompt, want, monkeypatch):
    engine = Engine(tiny2, drafters.NGram())
    handle = engine.submit(prompt, NUM_TOKENS, stop_token_ids=())

    def full(*args):
        raise DeviceMemoryError("LatentCache: expected more")

    with monkeypatch.context() as patch:
        patch.setattr(engine_module.TreeForward, "allocate", full)
        patch.setattr(engine_module.DeviceForward, "allocate", full)
        with pytest.raises(DeviceMemoryError):
            handle.result()
    assert handle.result().tokens == want.tokens


@pytest.mark.parametrize("call", ["step", "run", "result"])
def test_no_step_inside_a_step(tiny2, prompts, ar, script, call):
    """A drafter that takes steps is an error, and costs nobody a token."""

    def answer(context):
        getattr(handles[1] if call == "result" else engine, call)()

    engine = Engine(tiny2, script(answer), budget=4)
    handles = submit_all(engine, prompts["tiny2"])
    with pytest.raises(ValueError, match="expected no step of this engine in progress, got one inside another"):
        engine.run()
    engine.drafter = drafters.NGram()
    engine.run()
    assert [h.tokens for h in handles] == [g.tokens for g in ar("tiny2")]
