from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdtree_nb.model import ByteTokenizer, StreamDecoder

tokenizer = ByteTokenizer()


@given(st.text())
def test_text_survives_the_round_trip(text):
    ids = tokenizer.encode(text)
    assert all(0 <= t < 256 for t in ids)
    assert tokenizer.decode(ids) == text


@given(st.lists(st.integers(0, 330)))
def test_streaming_gives_what_decoding_at_once_gives(ids):
    decoder = StreamDecoder()
    pieces = [decoder.push(t) for t in ids]
    assert "".join(pieces) + decoder.finish() == tokenizer.decode(ids)


@given(st.lists(st.integers(0, 255)))
def test_bytes_decode_as_python_decodes_them(ids):
    assert tokenizer.decode(ids) == bytes(ids).decode("utf-8", errors="replace")


def test_a_character_is_held_back_until_it_is_complete():
    decoder = StreamDecoder()
    assert [decoder.push(t) for t in tokenizer.encode("ä€")] == ["", "ä", "", "", "€"]
    assert decoder.finish() == ""


def test_a_character_cut_short_becomes_one_replacement():
    assert tokenizer.decode(tokenizer.encode("€")[:2]) == "\N{REPLACEMENT CHARACTER}"


def test_ids_beyond_bytes_have_no_text():
    assert tokenizer.decode([97, 300, 98]) == "a\N{REPLACEMENT CHARACTER}b"
    cut = tokenizer.encode("ä")[:1]
    assert tokenizer.decode([*cut, 256]) == "\N{REPLACEMENT CHARACTER}" * 2


def test_a_negative_id_is_an_error():
    with pytest.raises(ValueError, match="at least 0, got -1"):
        tokenizer.decode([-1])
