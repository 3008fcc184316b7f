"""The tokenizer of bytes as a tokenizer.json: ids are the bytes, there and back."""

from __future__ import annotations

import pytest
import tokenizers

from kdtree_nb.hf.byte_tokenizer import byte_characters, byte_tokenizer_json
from kdtree_nb.model.hf_tokenizer import find_tokenizer


def test_the_characters_are_those_of_the_library():
    assert set(byte_characters()) == set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    assert len(set(byte_characters())) == 256


@pytest.mark.parametrize("text", ["def f(x):\n\treturn x", "naïve — 汉字 🙂", " \r\n\x00\x7f", "a" * 500])
def test_ids_are_bytes(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer_json(), encoding="utf-8")
    tokenizer = find_tokenizer(tmp_path)
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text
