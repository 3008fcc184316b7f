"""The corpus as token ids: encoded once, kept in a file, and packed small enough to be carried to another machine.

A file holds three streams in a KDTR container, plain (int16) or packed (LZMA), and a record that says what they are.
"""

from __future__ import annotations

import hashlib
import lzma
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kdtree_nb.errors import CorpusError
from kdtree_nb.kdtr import open_kdtr, write_kdtr
from kdtree_nb.train.corpus import Document, is_heldout
from kdtree_nb.train.nano import documents as reading
from kdtree_nb.train.nano.manifest import Manifest, pinned_documents
from kdtree_nb.train.nano.tokenizer import encode, fingerprint, load_tokenizer

STREAMS = ("train", "code", "prose")
"""What is trained on, and the two held-out streams, by the kind of their documents."""

_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 26}]
"""LZMA that looks back as far as the largest package is long."""


class TokenCorpus(NamedTuple):
    """Streams of token ids, int16 [n] by name, every document followed by EOS; the record pins them.

    record: {"source", "python", "manifest", "tokenizer", "streams": {name: {"num_documents", "num_bytes",
    "num_tokens", "sha256"}}}, fingerprints in hexadecimal
    """

    streams: dict[str, np.ndarray]
    record: dict[str, Any]

    def bytes_per_token(self, stream: str) -> float:
        """Bytes of text behind a token of a stream, on average."""
        record = self.record["streams"][stream]
        return record["num_bytes"] / record["num_tokens"]


def pinned_corpus(manifest: Manifest, tokenizer_path: Path) -> TokenCorpus:
    """The manifest's corpus from the running environment. Raises CorpusError where that differs."""
    documents = {kind: pinned_documents(manifest, kind, "heldout") for kind in reading.KINDS}
    documents["train"] = [d for kind in reading.KINDS for d in pinned_documents(manifest, kind, "train")]
    return encode_corpus(documents, tokenizer_path, "packages of the manifest", manifest.fingerprint)


def standard_library_corpus(tokenizer_path: Path, max_bytes: int | None = None) -> TokenCorpus:
    """The running interpreter's standard library: no pinned text, but there everywhere. One file in 20 is held out.

    max_bytes: train on no more than this, files in the order of their names' hashes
    """
    code, prose = reading.read_python("code"), reading.read_python("prose")
    code.sort(key=lambda d: hashlib.sha256(d.name.encode()).digest())
    train = [d for d in code if not is_heldout(d.name)]
    ends = np.cumsum([len(d.text) for d in train])
    taken = train if max_bytes is None else train[: int(np.searchsorted(ends, max_bytes, side="right"))]
    streams = {"train": taken, "code": [d for d in code if is_heldout(d.name)], "prose": prose}
    return encode_corpus(streams, tokenizer_path, "standard library", "")


def encode_corpus(
    documents: dict[str, Sequence[Document]], tokenizer_path: Path, source: str, manifest: str
) -> TokenCorpus:
    """Token streams of documents by stream name. CorpusError when a stream has none."""
    tokenizer, streams, records = load_tokenizer(tokenizer_path), {}, {}
    for name in STREAMS:
        streams[name] = encode(tokenizer, documents[name], f"encode {name}")
        if not len(streams[name]):
            raise CorpusError(f"corpus: {source}: expected documents for the stream {name!r}, got none")
        records[name] = {
            "num_documents": len(documents[name]),
            "num_bytes": sum(len(d.text) for d in documents[name]),
            "num_tokens": len(streams[name]),
            "sha256": _sha256(streams[name]),
        }
    record = {"source": source, "python": reading.python_version(), "manifest": manifest,
              "tokenizer": fingerprint(tokenizer_path), "streams": records}  # fmt: skip
    return TokenCorpus(streams, record)


def save_tokens(path: Path, corpus: TokenCorpus, packed: bool) -> None:
    """Write the corpus, plain (fast to read) or packed (about a quarter of the size)."""
    streams = {name: _squeeze(stream) if packed else stream for name, stream in corpus.streams.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_kdtr(path, streams, {"corpus": corpus.record, "packed": packed})


def load_tokens(path: Path) -> TokenCorpus:
    """Read what `save_tokens` wrote, and compare it with its record. Raises CorpusError or KdtrError."""
    file = open_kdtr(path)
    record = file.metadata.get("corpus")
    if not isinstance(record, dict) or sorted(file.names) != sorted(STREAMS):
        raise CorpusError(f"corpus: {path}: expected token streams {list(STREAMS)}, got {sorted(file.names)}")
    streams = {}
    for name in STREAMS:
        stored = file.array(name)
        streams[name] = _expand(stored) if file.metadata["packed"] else np.array(stored)
        expected = record["streams"][name]["sha256"]
        if _sha256(streams[name]) != expected:
            raise CorpusError(f"corpus: {path}: {name}: expected tokens of hash {expected[:12]}, got others")
    return TokenCorpus(streams, record)


def check_tokenizer(corpus: TokenCorpus, tokenizer_path: Path) -> None:
    """Raises CorpusError when the corpus was encoded with another tokenizer."""
    have = fingerprint(tokenizer_path)
    if corpus.record["tokenizer"] != have:
        raise CorpusError(
            f"corpus: expected tokens of the tokenizer {tokenizer_path} ({have[:12]}), got tokens of another "
            f"({corpus.record['tokenizer'][:12]}); pack the corpus again with `kdtree-nb train-nano pack`"
        )


def _sha256(stream: np.ndarray) -> str:
    return hashlib.sha256(stream.astype("<i2").tobytes()).hexdigest()


def _squeeze(stream: np.ndarray) -> np.ndarray:
    return np.frombuffer(lzma.compress(stream.astype("<i2").tobytes(), lzma.FORMAT_XZ, filters=_FILTERS), np.uint8)


def _expand(packed: np.ndarray) -> np.ndarray:
    return np.frombuffer(lzma.decompress(packed.tobytes()), "<i2").astype(np.int16)
