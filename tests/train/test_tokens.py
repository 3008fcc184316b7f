"""Tokenizer and token streams: deterministic, reversible, pinned, and small when packed."""

from __future__ import annotations

import numpy as np
import pytest

from kdtree_nb.errors import CorpusError
from kdtree_nb.kdtr import open_kdtr, write_kdtr
from kdtree_nb.train.corpus import Document
from kdtree_nb.train.nano.tokenizer import EOS, MASK, TOKENIZER_PATH, encode, load_tokenizer, save_tokenizer, train_bpe
from kdtree_nb.train.nano.tokens import (
    check_tokenizer,
    encode_corpus,
    load_tokens,
    save_tokens,
    standard_library_corpus,
)


def test_the_same_text_gives_the_same_tokenizer(toy_documents):
    first = train_bpe(toy_documents["train"], 280)
    assert first == train_bpe(toy_documents["train"][::-1], 280)
    assert first != train_bpe(toy_documents["train"], 279)


def test_too_little_text_is_refused():
    with pytest.raises(ValueError, match="text enough for 4096 entries, got"):
        train_bpe([Document("a.py", b"x = 1\n" * 100)], 4096)


def test_ids_give_the_text_back(toy_tokenizer):
    tokenizer = load_tokenizer(toy_tokenizer)
    texts = ["value = \ttotal\n", "naïve <|eos|> 漢字\n", "\n\n"]
    ids = encode(tokenizer, [Document("x", t.encode()) for t in texts]).tolist()
    assert ids.count(EOS) == 3 and MASK not in ids and ids[-1] == EOS
    pieces, at = [], 0
    for _ in texts:
        end = ids.index(EOS, at)
        pieces.append(tokenizer.decode(ids[at:end], skip_special_tokens=False))
        at = end + 1
    assert pieces == texts


def test_the_committed_tokenizer_knows_code():
    tokenizer = load_tokenizer(TOKENIZER_PATH)
    assert tokenizer.get_vocab_size() == 4096
    assert (tokenizer.token_to_id("<|eos|>"), tokenizer.token_to_id("<|mask|>")) == (EOS, MASK)
    text = "def read(self, path):\n    return self.value\n"
    assert len(tokenizer.encode(text).ids) < len(text) / 2.5
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize("packed", [False, True])
def test_tokens_survive_a_file(toy_corpus, tmp_path, packed):
    save_tokens(tmp_path / "tokens", toy_corpus, packed)
    loaded = load_tokens(tmp_path / "tokens")
    assert loaded.record == toy_corpus.record
    assert all(np.array_equal(loaded.streams[name], stream) for name, stream in toy_corpus.streams.items())
    size = (tmp_path / "tokens").stat().st_size
    plain = sum(stream.nbytes for stream in toy_corpus.streams.values())
    assert size < plain / 2 if packed else size > plain
    assert toy_corpus.bytes_per_token("train") > 2


def test_other_tokens_than_the_record_says_are_refused(toy_corpus, tmp_path):
    save_tokens(tmp_path / "tokens", toy_corpus, packed=False)
    file = open_kdtr(tmp_path / "tokens")
    streams = {name: np.array(file.array(name)) for name in file.names}
    streams["code"][5] ^= 1
    write_kdtr(tmp_path / "other", streams, file.metadata)
    with pytest.raises(CorpusError, match="code: expected tokens of hash"):
        load_tokens(tmp_path / "other")
    del streams["code"]
    write_kdtr(tmp_path / "fewer", streams, file.metadata)
    with pytest.raises(CorpusError, match="expected token streams"):
        load_tokens(tmp_path / "fewer")


def test_a_corpus_of_another_tokenizer_is_refused(toy_corpus, toy_tokenizer, toy_documents, tmp_path):
    check_tokenizer(toy_corpus, toy_tokenizer)
    save_tokenizer(tmp_path / "other.json", train_bpe(toy_documents["code"], 270))
    with pytest.raises(CorpusError, match="expected tokens of the tokenizer"):
        check_tokenizer(toy_corpus, tmp_path / "other.json")
    with pytest.raises(CorpusError, match="found nothing at .*none.json; make it: kdtree-nb train-nano tokenizer"):
        load_tokenizer(tmp_path / "none.json")


def test_an_empty_stream_is_refused(toy_documents, toy_tokenizer):
    with pytest.raises(CorpusError, match="expected documents for the stream 'code', got none"):
        encode_corpus({**toy_documents, "code": []}, toy_tokenizer, "toy", "")


def test_the_standard_library_is_there_everywhere(toy_tokenizer):
    corpus = standard_library_corpus(toy_tokenizer, 200_000)
    assert 100_000 < corpus.record["streams"]["train"]["num_bytes"] <= 200_000
    assert corpus.record["source"] == "standard library" and corpus.record["streams"]["code"]["num_documents"] > 5
