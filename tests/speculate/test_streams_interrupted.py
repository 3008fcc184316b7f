"""Submitted streams: Ctrl-C and signal handlers at any line of the engine; nothing is emitted twice or left out."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from kdtree_nb import Engine, Sampling, drafters
from kdtree_nb import speculate as speculate_package
from kdtree_nb.speculate.streams import Streams
from tests.speculate.shared import NUM_TOKENS, submit_all

PACKAGE = str(Path(speculate_package.__file__).parent)


def press_ctrl_c():
    raise KeyboardInterrupt


class Interrupt:
    """Calls `action` at the `count`-th line that is run in the folder of the engine, as a signal handler may. From then
    on nothing is traced: what is left of the run takes its usual time.

    action: by default raises KeyboardInterrupt, as Ctrl-C does
    """

    def __init__(self, count: int, action=press_ctrl_c) -> None:
        self.left, self.where, self.action = count, None, action

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *error):
        sys.settrace(self.before)

    def _call(self, frame, event, argument):
        return self._line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _line(self, frame, event, argument):
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.where = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
                sys.settrace(self.before)
                self.action()
        return self._line


@pytest.mark.parametrize("drafting", ["on the host", "on the device"])
def test_ctrl_c_at_any_line(tiny2, prompts, ar, skip_gram, drafting):
    """Streams go on with what was emitted. Whatever was interrupted, nothing is emitted twice, none is left out."""
    drafter = drafters.NGram() if drafting == "on the host" else skip_gram
    rng, places = np.random.default_rng(0), set()
    samplings = [None, Sampling(1.0, seed=5), None]
    hot = Engine(tiny2).generate_ar(prompts["tiny2"][1], NUM_TOKENS, sampling=samplings[1], stop_token_ids=())
    want = [ar("tiny2")[0].tokens, hot.tokens, ar("tiny2")[2].tokens]
    for _ in range(12):
        engine = Engine(tiny2, drafter, budget=6, max_streams=2)
        handles = [
            engine.submit(p, NUM_TOKENS, sampling=s, stop_token_ids=(), return_logits=i == 0)
            for i, (p, s) in enumerate(zip(prompts["tiny2"], samplings, strict=True))
        ]
        for _ in range(4):
            shown = [handle.tokens for handle in handles]
            with Interrupt(int(rng.integers(1, 900))) as interrupt:
                try:
                    engine.run()
                except KeyboardInterrupt:
                    places.add(interrupt.where)
            assert all(handle.tokens[: len(old)] == old for handle, old in zip(handles, shown, strict=True))
        engine.run()
        assert [handle.result().tokens for handle in handles] == want
        assert torch.equal(handles[0].result().logits, ar("tiny2")[0].logits)
        for handle in handles:
            assert handle.stats.num_tokens == NUM_TOKENS and len(handle.latency.token_s) == NUM_TOKENS
    assert len(places) > 20


@pytest.mark.parametrize("ending", ["cancel", "close"])
@pytest.mark.parametrize("drafting", ["on the host", "on the device"])
def test_a_signal_handler_ends_streams_at_any_line(tiny2, prompts, ar, skip_gram, drafting, ending):
    """Also in the middle of a step: the ended have what was there to be read, the others and who comes then all."""
    drafter = drafters.NGram() if drafting == "on the host" else skip_gram
    inside = 0
    for count in range(150, 1500, 61):
        engine = Engine(tiny2, drafter, budget=6, max_streams=2)
        handles = submit_all(engine, prompts["tiny2"], return_logits=True)
        shown = []

        def act(engine=engine, handles=handles, shown=shown):
            shown.append(handles[0].tokens)
            if ending == "close":
                engine.close()
            elif handles[0].cancel():
                handles.append(engine.submit(prompts["tiny2"][0], NUM_TOKENS, stop_token_ids=(), return_logits=True))

        with Interrupt(count, act) as interrupt:
            engine.run()
        inside += ".step:" in interrupt.where or "Batch" in interrupt.where
        assert handles[0].result().tokens == handles[0].tokens == shown[0] or not handles[0].cancel()
        for handle, alone in zip(handles, [*ar("tiny2"), ar("tiny2")[0]], strict=False):
            got, n = handle.result(), handle.num_tokens
            assert got.finish_reason == handle.finish_reason
            assert n == NUM_TOKENS or got.finish_reason == ("closed" if ending == "close" else "cancelled")
            assert got.tokens == alone.tokens[:n] and torch.equal(got.logits, alone.logits[:n])
            assert n == got.stats.num_tokens == sum(got.stats.accepted_per_step) + len(got.stats.nodes_per_step)
    assert inside > 3


class InterruptIn(Interrupt):
    """The same at the `count`-th line of one function and what is defined in it."""

    def __init__(self, count: int, action, function) -> None:
        super().__init__(count, action)
        self.name = function.__qualname__

    def _call(self, frame, event, argument):
        is_in = frame.f_code.co_qualname.split(".<locals>")[0] == self.name
        return super()._call(frame, event, argument) if is_in else None


@pytest.mark.parametrize("function", [Streams._sweep, Streams.submit, Streams.close, Streams.end])
def test_a_signal_handler_submits_and_cancels_while_the_queue_changes(tiny2, prompts, ar, function):
    """At any line: none of the streams is lost, all have indices of their own, and reading one comes to an end."""
    wanted, place, where = prompts["tiny2"][0], 0, ""
    while where is not None:
        engine, place = Engine(tiny2, drafters.NGram(), budget=6), place + 1
        handles = submit_all(engine, prompts["tiny2"], [4, 1, 2])

        def act(engine=engine, handles=handles):
            if not engine._streams.is_closed:
                handles.append(engine.submit(wanted, 4, stop_token_ids=()))
            handles[2].cancel()

        with InterruptIn(place, act, function) as interrupt:
            engine.step()
            handles += submit_all(engine, [wanted], 4)
            handles[0].cancel()
            engine.close()
        where = interrupt.where
        assert all(handle.is_finished for handle in handles) and not engine._streams._unfinished
        assert len({handle.index for handle in handles}) == len(handles)
    assert place > 3


@pytest.mark.parametrize("is_pressed_twice", [False, True])
def test_cancel_and_close_after_ctrl_c(tiny2, prompts, ar, monkeypatch, is_pressed_twice):
    def give_up(self, error):
        self._batch = None
        raise error

    if is_pressed_twice:
        monkeypatch.setattr(Streams, "_give_up", give_up)
    for count in range(100, 500, 23):
        engine = Engine(tiny2, drafters.NGram(), budget=6)
        handles = submit_all(engine, prompts["tiny2"], return_logits=True)
        engine.step()
        with Interrupt(count) as interrupt, pytest.raises(KeyboardInterrupt):
            engine.run()
        assert interrupt.where
        assert handles[0].cancel()
        engine.step()
        engine.close()
        for handle, alone in zip(handles, ar("tiny2"), strict=True):
            got = handle.result()
            assert got.tokens == alone.tokens[: len(got.tokens)]
            assert torch.equal(got.logits, alone.logits[: len(got.tokens)])
