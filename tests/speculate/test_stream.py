from __future__ import annotations

import pytest

from kdtree_nb.errors import NonFiniteError
from kdtree_nb.speculate.stream import Stream


def stream(max_tokens=6, stop_tokens=()):
    return Stream(2, [1, 2], 2, max_tokens, "length", frozenset(stop_tokens), budget=4)


def test_emit_goes_on_to_the_limit():
    s = stream()
    assert s.emit([5, 6]) == [5, 6] and s.finish_reason is None and s.num_remaining == 2
    assert s.emit([7, 8, 9]) == [7, 8]
    assert s.finish_reason == "length" and s.tokens == [1, 2, 5, 6, 7, 8]


def test_emit_stops_behind_a_stop_token():
    s = stream(stop_tokens=[6])
    assert s.emit([5, 6, 7]) == [5, 6]
    assert s.finish_reason == "eos"


def test_a_stop_token_as_the_last_possible_one_is_the_reason():
    s = stream(max_tokens=3, stop_tokens=[5])
    s.emit([5])
    assert s.finish_reason == "eos"


def test_a_stream_without_room_has_finished_at_once():
    assert stream(max_tokens=2).finish_reason == "length"


def test_minus_one_says_that_the_logits_were_nan():
    s = stream()
    with pytest.raises(NonFiniteError, match="stream 2: .* position 2 "):
        s.emit([5, -1])
    assert s.tokens == [1, 2, 5]


def test_nothing_behind_the_end_is_looked_at():
    assert stream(max_tokens=3).emit([5, -1]) == [5]


def test_a_step_counts_only_what_was_emitted():
    s = stream()
    s.record_step(num_nodes=9, num_accepted=4, num_emitted=3)
    assert s.stats.accepted_per_step == [3] and s.stats.nodes_per_step == [9] and s.stats.num_tokens == 3
