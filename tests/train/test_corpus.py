"""The training text: what is left out, how files are joined and held out, and that the record pins the bytes."""

from __future__ import annotations

import hashlib
import platform

import numpy as np
import pytest

from kdtree_nb.train import corpus as module
from kdtree_nb.train.corpus import build_corpus, is_heldout, load_corpus, read_documents, save_corpus

LINE = b"x = 1  # some text\n"


@pytest.fixture
def library(tmp_path):
    kept = {f"package/module_{i}.py": LINE * (20 + i) for i in range(60)}
    dropped = {
        "test/test_x.py": LINE * 20,
        "package/tests/test_y.py": LINE * 20,
        "site-packages/other.py": LINE * 20,
        "encodings/table.py": LINE * 20,
        "html/entities.py": LINE * 20,
        "_sysconfigdata_linux.py": LINE * 20,
        "config-3.11/made.py": LINE * 20,
        "short.py": LINE,
        "huge.py": LINE * 20000,
        "latin1.py": LINE * 20 + b"\xe9",
        "zero.py": LINE * 20 + b"\0",
        "notes.txt": LINE * 20,
    }
    for name, text in (kept | dropped).items():
        path = tmp_path / "library" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    return tmp_path / "library", kept


def test_documents_are_the_source_files_in_order_of_name(library):
    folder, kept = library
    documents = read_documents(folder)
    assert [d.name for d in documents] == sorted(kept)
    assert {d.name: d.text for d in documents} == kept


def test_line_ends_are_unified(library):
    folder, _ = library
    (folder / "dos.py").write_bytes(LINE.replace(b"\n", b"\r\n") * 20)
    assert next(d for d in read_documents(folder) if d.name == "dos.py").text == LINE * 20


def test_streams_hold_every_document_once_with_separators(library):
    documents = read_documents(library[0])
    corpus = build_corpus(documents)
    for stream, heldout in ((corpus.train, False), (corpus.heldout, True)):
        texts = stream.tobytes().split(b"\0")
        assert texts.pop() == b""
        assert texts == [d.text for d in documents if is_heldout(d.name) == heldout] != []
    record = corpus.record
    assert record["heldout_files"] == [d.name for d in documents if is_heldout(d.name)]
    assert record["num_bytes"] == len(corpus.train) + len(corpus.heldout)
    assert record["sha256"] == hashlib.sha256(b"".join(d.text + b"\0" for d in documents)).hexdigest()


def test_the_record_changes_with_any_byte(library):
    folder, _ = library
    before = build_corpus(read_documents(folder)).record
    (folder / "package/module_7.py").write_bytes(LINE * 26 + LINE.replace(b"1", b"2"))
    after = build_corpus(read_documents(folder)).record
    assert before["sha256"] != after["sha256"] and before["num_bytes"] == after["num_bytes"]


def test_heldout_share_is_about_five_percent():
    share = np.mean([is_heldout(f"package/module_{i}.py") for i in range(4000)])
    assert 0.03 < share < 0.07


def test_corpus_of_this_interpreter_survives_a_file(tmp_path):
    corpus = load_corpus()
    assert corpus.record["interpreter"] == f"{platform.python_implementation()} {platform.python_version()}"
    assert corpus.record["num_files"] > 300 and corpus.record["num_bytes"] > 4_000_000
    assert not any(name.startswith(("test/", "idlelib/")) for name in corpus.record["heldout_files"])
    save_corpus(tmp_path / "corpus.kdtr", corpus)
    loaded = load_corpus(tmp_path / "corpus.kdtr")
    assert loaded.record == corpus.record
    assert np.array_equal(loaded.train, corpus.train) and np.array_equal(loaded.heldout, corpus.heldout)


def test_nothing_to_read_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="read_documents: expected a library folder"):
        read_documents(tmp_path)
    with pytest.raises(ValueError, match="build_corpus: expected files to train on and to hold out"):
        build_corpus([module.Document("a.py", LINE)])
