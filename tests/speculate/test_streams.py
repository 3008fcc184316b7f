"""Submitted streams: each as alone, whoever joins and leaves; when something goes wrong, the others lose nothing."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from kdtree_nb import Engine, Sampling, drafters
from kdtree_nb import speculate as speculate_package
from kdtree_nb.errors import DeviceMemoryError, NonFiniteError, QueueFullError
from kdtree_nb.model import build_model
from kdtree_nb.speculate import engine as engine_module
from kdtree_nb.speculate.batch import PREFILL_CHUNK_TOKENS, Batch
from kdtree_nb.speculate.cost import CostModel, Surface
from kdtree_nb.speculate.cost_store import cost_key, drafter_key
from kdtree_nb.speculate.mode import num_tree_slots
from kdtree_nb.speculate.streams import Streams
from kdtree_nb.tiny2 import tiny2_config, tiny2_weights
from tests.speculate.schedules import Schedule, Tally, solo_texts

NUM_TOKENS = 24
PACKAGE = str(Path(speculate_package.__file__).parent)


@pytest.fixture(scope="module")
def texts(models):
    """Model name -> its `solo_texts`."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = solo_texts(models(name))
        return made[name]

    return get


@pytest.fixture
def prompt(prompts):
    return prompts["tiny2"][0]


@pytest.fixture
def want(ar):
    return ar("tiny2")[0].tokens


@pytest.fixture
def skip_gram(prompts, ar):
    """A drafter on the device for tiny2, right now and then."""
    whole = [p + g.tokens for p, g in zip(prompts["tiny2"], ar("tiny2"), strict=True)]
    return drafters.SkipGram(sum(whole, []), 331, depth=5, min_count=2)


def submit_all(engine, prompts, counts=NUM_TOKENS, **options):
    counts = [counts] * len(prompts) if isinstance(counts, int) else counts
    return [engine.submit(p, n, stop_token_ids=(), **options) for p, n in zip(prompts, counts, strict=True)]


def active_counts(monkeypatch) -> list[int]:
    """How many streams run at each step that is taken from now on."""
    seen, step = [], Batch.advance

    def advance(batch):
        step(batch)
        seen.append(len(batch.running))

    monkeypatch.setattr(Batch, "advance", advance)
    return seen


@pytest.mark.parametrize("name", ["tiny", "tiny2"])
@pytest.mark.parametrize("first", range(0, 20, 5))
def test_random_schedules(models, texts, name, first):
    """What every stream gets is what AR decoding alone gives it. `schedules.py` runs hundreds of them."""
    tally = Tally()
    for seed in range(first, first + 5):
        Schedule(models(name), texts(name), seed, tally).run()
    assert tally.streams > 20 and tally.joined_others > 5 and tally.accepted > 5 and tally.sampled > 5


@pytest.mark.parametrize("drafting", ["ar", "on the host", "on the device"])
def test_a_batch_shrinks_from_ten_to_one_and_grows_again(
    tiny2, prompts, ar, skip_gram, monkeypatch, kind, drafting
):  # fmt: skip
    """Under one captured step where the device takes them."""
    drafter = {"ar": None, "on the device": skip_gram, "on the host": drafters.NGram()}[drafting]
    engine = Engine(tiny2, drafter, budget=0 if drafting == "ar" else 5)
    running = active_counts(monkeypatch)
    counts = [24, 18, 16, 17, 20, 16, 18, 16, 19, 17]
    for _ in range(2):
        handles = submit_all(engine, [prompts["tiny2"][i % 3] for i in range(10)], counts)
        first = handles[0].result()
        assert all(handle.is_finished for handle in handles) and first.tokens == ar("tiny2")[0].tokens
        for i, (handle, count) in enumerate(zip(handles, counts, strict=True)):
            assert handle.tokens == ar("tiny2")[i % 3].tokens[:count]
    assert max(running) == 10 and min(n for n in running if n) == 1 and running.count(0) == 2
    engine.step()
    (forward,) = engine._spares
    if kind == "device" and drafting != "on the host":  # whose trees take captures of several sizes
        assert len(forward._runners) == 1


def test_tokens_come_while_the_stream_runs(tiny2, prompt, want):
    engine = Engine(tiny2, drafters.Oracle(want, depth=3), budget=3)
    handle = engine.submit(prompt, NUM_TOKENS, stop_token_ids=())
    assert handle.tokens == [] and handle.finish_reason is None and not handle.is_finished
    tokens = iter(handle)
    assert next(tokens) == want[0]
    assert handle.tokens == want[:4] and not handle.is_finished and repr(handle) == "<Handle 0: 4 tokens, unfinished>"
    assert list(tokens) == want[1:] and handle.finish_reason == "length"
    assert list(handle) == want, "who comes later reads it from the beginning"
    got = handle.result()
    assert got.tokens == want and got is handle.result() and got.logits is None
    assert got.stats.accepted_per_step == [3] * 6 and got.stats.num_prefill_forwards == 1


def test_who_reads_one_handle_moves_the_others(tiny2, prompts, ar):
    engine = Engine(tiny2, drafters.NGram())
    handles = submit_all(engine, prompts["tiny2"])
    handles[2].result()
    assert all(len(handle.tokens) >= NUM_TOKENS // 4 for handle in handles)
    assert [handle.result().tokens for handle in handles] == [g.tokens for g in ar("tiny2")]
    assert not engine.step()


def test_run_finishes_all(tiny2, prompts, ar):
    engine = Engine(tiny2, drafters.NGram(), max_streams=1)
    handles = submit_all(engine, prompts["tiny2"], return_logits=True)
    engine.run()
    for handle, alone in zip(handles, ar("tiny2"), strict=True):
        assert handle.is_finished and torch.equal(handle.result().logits, alone.logits)


def test_first_come_first_served(tiny2, prompts):
    engine = Engine(tiny2, max_streams=2, drafter=drafters.NGram())
    handles = submit_all(engine, [prompts["tiny2"][i % 3] for i in range(6)], 5, budget=0)
    engine.run()
    for times in ([h.latency.seat_s for h in handles], [h.latency.token_s[-1] for h in handles]):
        at = [handle._start_s + seconds for handle, seconds in zip(handles, times, strict=True)]
        assert at[0] == pytest.approx(at[1], abs=1e-9) and at[2] > at[1] + 1e-9
        assert at[2] == pytest.approx(at[3], abs=1e-9) and at[4] > at[3] + 1e-9
    assert all(handle.latency.token_s == sorted(handle.latency.token_s) for handle in handles)
    assert all(handle.latency.seat_s <= handle.latency.token_s[0] for handle in handles)


def test_a_long_prompt_is_prefilled_between_the_steps_of_others(tiny2, prompt, want, monkeypatch):
    long = np.random.default_rng(0).integers(0, 331, 3 * PREFILL_CHUNK_TOKENS).tolist()
    alone = Engine(tiny2).generate_ar(long, 4, stop_token_ids=())
    engine = Engine(tiny2, drafters.NGram())
    first = engine.submit(prompt, NUM_TOKENS, budget=0, stop_token_ids=())
    engine.step()
    second = engine.submit(long, 4, budget=0, stop_token_ids=())
    seen = []
    while not second.tokens:
        before = len(first.tokens)
        engine.step()
        seen.append(len(first.tokens) - before)
    assert seen == [1] * 3 and second.stats.num_prefill_forwards == 3
    assert second.result().tokens == alone.tokens and first.result().tokens == want


def test_prompts_that_are_prefilled_together_share_the_chunk(tiny2, prompt, monkeypatch):
    monkeypatch.setattr("kdtree_nb.speculate.batch.PREFILL_CHUNK_TOKENS", 8)
    rng = np.random.default_rng(1)
    long, short = rng.integers(0, 331, 41).tolist(), rng.integers(0, 331, 5).tolist()
    alone = [Engine(tiny2).generate_ar(p, 3, stop_token_ids=()).tokens for p in (long, short)]
    engine = Engine(tiny2)
    engine.drafter = drafters.NGram()
    running = engine.submit(prompt[:2], NUM_TOKENS, budget=0, stop_token_ids=())
    engine.step()
    handles = submit_all(engine, [long, short], 3, budget=0)
    engine.step()
    assert len(handles[1].tokens) == 1 and not handles[0].tokens and len(running.tokens) == 2
    assert [handle.result().tokens for handle in handles] == alone
    assert handles[0].stats.num_prefill_forwards == 1 + 5 - 1 + 1  # 4 tokens, then 8 at a time


def test_a_full_queue(tiny2, prompts, ar):
    engine = Engine(tiny2, drafters.NGram(), max_streams=2, max_waiting=1)
    handles = submit_all(engine, prompts["tiny2"])
    engine.step()
    for _ in range(2):
        with pytest.raises(QueueFullError, match=r"got 3 unfinished streams \(max_streams 2, max_waiting 1\); read a"):
            engine.submit([1, 2], 4)
    handles[0].result()
    late = engine.submit(prompts["tiny2"][0], NUM_TOKENS, stop_token_ids=())
    assert late.index == 3
    engine.run()
    assert [h.tokens for h in [*handles, late]] == [ar("tiny2")[i].tokens for i in (0, 1, 2, 0)]


def test_cancelling_frees_the_place(tiny2, prompts, ar):
    engine = Engine(tiny2, drafters.NGram(), max_streams=1, max_waiting=2)
    handles = submit_all(engine, prompts["tiny2"], return_logits=True)
    for _ in range(3):
        engine.step()
    assert handles[0].cancel() and handles[2].cancel()
    got, done = handles[0].result(), len(handles[0].tokens)
    assert got.finish_reason == "cancelled" and 0 < done < NUM_TOKENS
    assert got.tokens == ar("tiny2")[0].tokens[:done] and torch.equal(got.logits, ar("tiny2")[0].logits[:done])
    assert list(handles[2]) == [] == handles[2].result().tokens and handles[2].latency.seat_s is None
    again = engine.submit(prompts["tiny2"][2], NUM_TOKENS, stop_token_ids=())
    engine.run()
    assert [handles[1].tokens, again.tokens] == [g.tokens for g in ar("tiny2")[1:]]


def test_cancel_twice_and_too_late(tiny2, prompts, ar):
    engine = Engine(tiny2, drafters.NGram())
    handles = submit_all(engine, prompts["tiny2"], [NUM_TOKENS, 3, NUM_TOKENS])
    handles[1].result()
    assert handles[1].cancel() is False and handles[1].finish_reason == "length"
    assert handles[0].cancel() is True
    with pytest.raises(ValueError, match="cancel: stream 0: expected one that was not cancelled yet"):
        handles[0].cancel()
    assert handles[2].result().tokens == ar("tiny2")[2].tokens


@pytest.mark.parametrize(
    ("arguments", "options", "error"),
    [
        (([1] * 400, 4), {}, "submit: expected at most 399 tokens, got 400: .*shorten"),
        (([], 4), {}, "submit: expected at least 1 token"),
        (([[1, 2], [3]], 4), {}, "submit: expected one list of token ids, got 2 items; submit prompts one by one"),
        (("text", 4), {}, "submit: expected token ids, got text; use model.tokenizer.encode"),
        (([1, 331], 4), {}, "submit: expected ids of 0 … 330, got 331 at position 1"),
        (([1], -1), {}, "submit: max_new_tokens: expected an integer of at least 0"),
        (([1], [4, 5]), {}, "submit: max_new_tokens: expected one integer"),
        (([1], 4), {"budget": 17}, r"submit: budget \(at most the engine's\): expected an integer of 0 … 16, got 17"),
        (([1], 4), {"budget": -1}, "submit: budget .*: expected an integer of 0 … 16, got -1"),
        (([1], 4), {"budget": "auto"}, "submit: budget .*: expected an integer of 0 … 16, got 'auto'"),
        (([1], 4), {"sampling": "hot"}, "sampling: expected a Sampling"),
        (([1], 4), {"stop_token_ids": [1.5]}, "stop_token_ids: expected integer token ids"),
    ],
)
def test_bad_input_leaves_the_others_alone(tiny2, prompt, want, arguments, options, error):
    engine = Engine(tiny2, drafters.NGram(), max_seq_len=400)
    handle = engine.submit(prompt, NUM_TOKENS, stop_token_ids=())
    engine.step()
    with pytest.raises(ValueError, match=error):
        engine.submit(*arguments, **options)
    assert handle.result().tokens == want
    assert engine.submit([1], 1).index == 1


def test_submit_without_a_drafter(tiny2, prompt, want):
    engine = Engine(tiny2)
    with pytest.raises(
        ValueError, match="submit: expected a drafter for budget 16, got none.*or budget=0, which is AR"
    ):
        engine.submit(prompt, 4)
    assert engine.submit(prompt, 4, budget=0, stop_token_ids=()).result().tokens == want[:4]


@pytest.mark.parametrize(("name", "value"), [("max_streams", 0), ("max_streams", 1.5), ("max_waiting", -1)])
def test_bad_limits(tiny2, name, value):
    with pytest.raises(ValueError, match=f"Engine: {name}: expected an integer of at least"):
        Engine(tiny2, **{name: value})


def test_more_streams_than_memory(tiny2, prompt, want):
    engine = Engine(tiny2, drafters.NGram(), max_streams=10**13)
    handle = engine.submit(prompt, 4, stop_token_ids=())
    with pytest.raises(DeviceMemoryError, match="LatentCache: expected .* GiB for 10000000000000 streams"):
        handle.result()
    assert engine.generate_ar(prompt, 4, stop_token_ids=()).tokens == want[:4]


def test_no_tokens_asked_for(tiny2, prompt):
    engine = Engine(tiny2, drafters.NGram())
    handle = engine.submit(prompt, 0, return_logits=True)
    assert handle.is_finished and list(handle) == []
    assert handle.result().finish_reason == "length" and handle.result().logits.shape == (0, 331)
    assert not engine.step()


def test_max_seq_len_ends_a_stream(tiny2, prompt, want):
    room = len(prompt) + 5
    got = Engine(tiny2, drafters.Oracle(want), max_seq_len=room).submit(prompt, 99, stop_token_ids=()).result()
    assert got.tokens == want[:5] and got.finish_reason == "max_seq_len"


def test_close_ends_all(tiny2, prompts, ar):
    engine = Engine(tiny2, drafters.NGram(), max_streams=2)
    handles = submit_all(engine, prompts["tiny2"])
    for _ in range(3):
        engine.step()
    engine.close()
    for handle, alone in zip(handles, ar("tiny2"), strict=True):
        got = handle.result()
        assert got.finish_reason == "closed" and got.tokens == alone.tokens[: len(got.tokens)]
    assert handles[0].tokens and not handles[2].tokens and engine._spares == []
    with pytest.raises(ValueError, match="submit: expected an engine that is open, got one that was closed"):
        engine.submit(prompts["tiny2"][0], 4)
    assert not engine.step() and handles[0].cancel() is False
    engine.close()


def test_generate_between_the_steps(tiny2, prompts, ar):
    engine = Engine(tiny2, drafters.NGram())
    handles = submit_all(engine, prompts["tiny2"])
    for _ in range(2):
        engine.step()
        got = engine.generate_ddtree(prompts["tiny2"], NUM_TOKENS, stop_token_ids=())
        assert [g.tokens for g in got] == [w.tokens for w in ar("tiny2")]
    engine.run()
    assert [h.tokens for h in handles] == [w.tokens for w in ar("tiny2")]


def test_what_was_captured_is_kept_for_the_next_streams(tiny2, prompt, want):
    engine = Engine(tiny2, drafters.NGram(), max_streams=3)
    forwards = []
    for _ in range(2):
        assert engine.submit(prompt, NUM_TOKENS, stop_token_ids=()).result().tokens == want
        engine.step()
        forwards += engine._spares
    assert len(forwards) == 2 and forwards[0] is forwards[1]


def poisonous(ar, device):
    """tiny2 whose embedding of the 6th emitted token of text 0 is NaN, where that token stands first; the token."""
    token = ar("tiny2")[0].tokens[5]
    weights = tiny2_weights()
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].copy()
    weights["model.embed_tokens.weight"][token] = np.nan
    return build_model(tiny2_config(), weights, device), token


def test_nan_logits_end_one_stream(prompts, ar, device):
    model, token = poisonous(ar, device)
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
    assert handle.result().tokens == want


def press_ctrl_c():
    raise KeyboardInterrupt


class Interrupt:
    """Calls `action` at the `count`-th line that is run in the folder of the engine, as a signal handler may.

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


def test_handles_in_several_threads(tiny2, prompts, ar):
    engine, results = Engine(tiny2, drafters.NGram(), max_streams=2), {}

    def work(number):
        handle = engine.submit(prompts["tiny2"][number % 3], NUM_TOKENS, stop_token_ids=())
        results[number] = list(handle)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: ar("tiny2")[number % 3].tokens for number in range(6)}


def rising_cost(model, kind, drafter, max_budget=16) -> CostModel:
    """1 second, and 0.05 for every row."""
    seats = [0] if kind == "host" else sorted({num_tree_slots(n) for n in range(1, max_budget + 2)})
    surfaces = tuple(
        Surface(size, S, (S, S * (max_budget + 1)), ((1 + 0.05 * S, 1 + 0.05 * S * (max_budget + 1)),))
        for S in (1, 10)
        for size in seats
    )
    return CostModel(cost_key(model, kind), max_budget, (1,), surfaces, {drafter_key(drafter): {1: 0.0}})


def test_trees_shrink_as_streams_grow(tiny2, prompt, want, skip_gram, kind):
    """budget "auto" knows how many run: the rows of a step are shared among them."""
    engine = Engine(tiny2, skip_gram, "auto", cost=rising_cost(tiny2, kind, skip_gram))
    sizes = {}
    for num_streams in (1, 10):
        handles = submit_all(engine, [prompt] * num_streams)
        engine.run()
        assert all(handle.tokens == want for handle in handles)
        sizes[num_streams] = handles[0].stats.nodes_per_step
    assert sum(sizes[10]) / len(sizes[10]) < sum(sizes[1]) / len(sizes[1])
    limited = engine.submit(prompt, NUM_TOKENS, budget=1, stop_token_ids=())
    assert limited.result().tokens == want and max(limited.stats.nodes_per_step) == 2


def test_seconds_are_those_of_the_time_in_the_batch(tiny2, prompts):
    engine = Engine(tiny2, drafters.NGram())
    first, second, third = submit_all(engine, prompts["tiny2"], [NUM_TOKENS, 2, NUM_TOKENS])
    engine.run()
    for stage in ("prefill", "verify"):
        assert 0 < second.stats.seconds[stage] <= first.stats.seconds[stage]
    assert second.stats.seconds["verify"] < first.stats.seconds["verify"] == third.stats.seconds["verify"]
