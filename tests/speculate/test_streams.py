"""Submitted streams: each as alone, whoever joins and leaves."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from kdtree_nb import Engine, drafters
from kdtree_nb.speculate.batch import PREFILL_CHUNK_TOKENS, Batch
from tests.speculate.schedules import Schedule, Tally, solo_texts
from tests.speculate.shared import NUM_TOKENS, linear_cost, submit_all


@pytest.fixture(scope="module")
def texts(models):
    """Model name -> its `solo_texts`."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = solo_texts(models(name))
        return made[name]

    return get


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
    engine = Engine(tiny2, drafters.Oracle(want.tokens, depth=3), budget=3)
    handle = engine.submit(prompt, NUM_TOKENS, stop_token_ids=())
    assert handle.tokens == [] and handle.finish_reason is None and not handle.is_finished
    tokens = iter(handle)
    assert next(tokens) == want.tokens[0]
    assert (
        handle.tokens == want.tokens[:4]
        and not handle.is_finished
        and repr(handle) == "<Handle 0: 4 tokens, unfinished>"
    )
    assert list(tokens) == want.tokens[1:] and handle.finish_reason == "length"
    assert list(handle) == want.tokens, "who comes later reads it from the beginning"
    got = handle.result()
    assert got.tokens == want.tokens and got is handle.result() and got.logits is None
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
    assert second.result().tokens == alone.tokens and first.result().tokens == want.tokens


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
        assert engine.submit(prompt, NUM_TOKENS, stop_token_ids=()).result().tokens == want.tokens
        engine.step()
        forwards += engine._spares
    assert len(forwards) == 2 and forwards[0] is forwards[1]


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


def test_trees_shrink_as_streams_grow(tiny2, prompt, want, skip_gram, kind):
    """budget "auto" knows how many run: the rows of a step are shared among them."""
    engine = Engine(tiny2, skip_gram, "auto", cost=linear_cost(tiny2, kind, skip_gram, 0.05))
    sizes = {}
    for num_streams in (1, 10):
        handles = submit_all(engine, [prompt] * num_streams)
        engine.run()
        assert all(handle.tokens == want.tokens for handle in handles)
        sizes[num_streams] = handles[0].stats.nodes_per_step
    assert sum(sizes[10]) / len(sizes[10]) < sum(sizes[1]) / len(sizes[1])
    limited = engine.submit(prompt, NUM_TOKENS, budget=1, stop_token_ids=())
    assert limited.result().tokens == want.tokens and max(limited.stats.nodes_per_step) == 2


def test_seconds_are_those_of_the_time_in_the_batch(tiny2, prompts):
    engine = Engine(tiny2, drafters.NGram())
    first, second, third = submit_all(engine, prompts["tiny2"], [NUM_TOKENS, 2, NUM_TOKENS])
    engine.run()
    for stage in ("prefill", "verify"):
        assert 0 < second.stats.seconds[stage] <= first.stats.seconds[stage]
    assert second.stats.seconds["verify"] < first.stats.seconds["verify"] == third.stats.seconds["verify"]
