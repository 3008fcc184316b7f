"""Submitted streams: what is refused, and how a stream ends before its text does; the others lose nothing."""

from __future__ import annotations

import pytest
import torch

from kdtree_nb import Engine, drafters
from kdtree_nb.errors import DeviceMemoryError, QueueFullError
from tests.speculate.shared import NUM_TOKENS, submit_all


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
    assert handle.result().tokens == want.tokens
    assert engine.submit([1], 1).index == 1


def test_submit_without_a_drafter(tiny2, prompt, want):
    engine = Engine(tiny2)
    with pytest.raises(
        ValueError, match="submit: expected a drafter for budget 16, got none.*or budget=0, which is AR"
    ):
        engine.submit(prompt, 4)
    assert engine.submit(prompt, 4, budget=0, stop_token_ids=()).result().tokens == want.tokens[:4]


@pytest.mark.parametrize(("name", "value"), [("max_streams", 0), ("max_streams", 1.5), ("max_waiting", -1)])
def test_bad_limits(tiny2, name, value):
    with pytest.raises(ValueError, match=f"Engine: {name}: expected an integer of at least"):
        Engine(tiny2, **{name: value})


def test_more_streams_than_memory(tiny2, prompt, want):
    engine = Engine(tiny2, drafters.NGram(), max_streams=10**13)
    handle = engine.submit(prompt, 4, stop_token_ids=())
    with pytest.raises(DeviceMemoryError, match="LatentCache: expected .* GiB for 10000000000000 streams"):
        handle.result()
    assert engine.generate_ar(prompt, 4, stop_token_ids=()).tokens == want.tokens[:4]


def test_no_tokens_asked_for(tiny2, prompt):
    engine = Engine(tiny2, drafters.NGram())
    handle = engine.submit(prompt, 0, return_logits=True)
    assert handle.is_finished and list(handle) == []
    assert handle.result().finish_reason == "length" and handle.result().logits.shape == (0, 331)
    assert not engine.step()


def test_max_seq_len_ends_a_stream(tiny2, prompt, want):
    room = len(prompt) + 5
    got = Engine(tiny2, drafters.Oracle(want.tokens), max_seq_len=room).submit(prompt, 99, stop_token_ids=()).result()
    assert got.tokens == want.tokens[:5] and got.finish_reason == "max_seq_len"


def test_any_free_seat_has_room_for_the_longest_text(tiny2, prompts, ar):
    """Whoever waits is let in at once where a seat is free; the cache of the first turn is enough for all that come."""
    room = max(map(len, prompts["tiny2"])) + NUM_TOKENS
    engine = Engine(tiny2, drafters.NGram(), max_seq_len=room, max_streams=2)
    handles = submit_all(engine, prompts["tiny2"], room)
    engine.step()
    cache = engine._streams._batch.cache
    assert cache.num_streams == 2 and cache.num_slots >= room + 1 + 16
    assert [handle.latency.seat_s is None for handle in handles] == [False, False, True]
    handles[1].cancel()
    longest = engine.submit(prompts["tiny2"][0], room, stop_token_ids=())
    engine.step()
    assert handles[2].latency.seat_s is not None and longest.latency.seat_s is None
    handles[2].cancel()
    engine.step()
    assert longest.latency.seat_s is not None and engine._streams._batch.cache is cache
    engine.run()
    assert handles[0].result().finish_reason == longest.result().finish_reason == "max_seq_len"
    num_tokens = room - len(prompts["tiny2"][0])
    assert handles[0].tokens == longest.tokens == ar("tiny2")[0].tokens[:num_tokens]


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
