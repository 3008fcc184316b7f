"""The training text: Python source files of an interpreter's standard library, as bytes, with files held out whole.

`python -m kdtree_nb.train.corpus --out corpus.kdtr` packs the corpus of the running interpreter, so that a model can be
trained elsewhere on exactly these bytes. The standard library is under the PSF licence; this project holds none of it.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kdtree_nb.kdtr import open_kdtr, write_kdtr

SEPARATOR = 0
"""Byte behind every document; the model's end-of-text token."""

EXCLUDED_FOLDERS = frozenset(
    "test tests idlelib site-packages dist-packages __pycache__ encodings pydoc_data".split()  # tests and big tables
)
EXCLUDED_FILES = frozenset({"html/entities.py", "locale.py"})
MIN_BYTES, MAX_BYTES = 200, 256 * 1024
HELDOUT_PERCENT = 5


class Document(NamedTuple):
    """One source file: its name below the library folder, with slashes, and its bytes."""

    name: str
    text: bytes


class Corpus(NamedTuple):
    """Bytes to train on and bytes to measure on, uint8 [n]; `record` says what they are and pins them by SHA-256."""

    train: np.ndarray
    heldout: np.ndarray
    record: dict[str, Any]


def read_documents(folder: str | Path | None = None) -> list[Document]:
    """The library's source files in order of name; `folder` defaults to the running interpreter's.

    Left out: tests, idlelib, installed packages, tables, generated files, and what is tiny, huge or not UTF-8.
    ValueError when nothing is left.
    """
    root = Path(sysconfig.get_paths()["stdlib"] if folder is None else folder)
    documents = []
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        name = path.relative_to(root).as_posix()
        if EXCLUDED_FOLDERS.intersection(name.split("/")) or name in EXCLUDED_FILES or _is_generated(name):
            continue
        text = path.read_bytes().replace(b"\r\n", b"\n")
        if MIN_BYTES <= len(text) <= MAX_BYTES and SEPARATOR not in text and is_utf8(text):
            documents.append(Document(name, text))
    if not documents:
        raise ValueError(f"read_documents: expected a library folder with Python files, got none below {root}")
    return documents


def is_heldout(name: str) -> bool:
    """Whether a file is measured on, never trained on: a fixed pseudo-random 5 % of the names."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 100 < HELDOUT_PERCENT


def build_corpus(documents: list[Document]) -> Corpus:
    """Join documents, each followed by byte 0, into a training and a held-out stream. ValueError when one is empty."""
    streams = {
        part: b"".join(d.text + bytes([SEPARATOR]) for d in documents if is_heldout(d.name) == part)
        for part in (False, True)
    }
    if not (streams[False] and streams[True]):
        raise ValueError(f"build_corpus: expected files to train on and to hold out, got {len(documents)} in one part")
    whole = hashlib.sha256()
    for document in documents:
        whole.update(document.text + bytes([SEPARATOR]))
    record = {
        "source": "Python standard library (*.py)",
        "licence": "PSF-2.0",
        "interpreter": f"{platform.python_implementation()} {platform.python_version()}",
        "num_files": len(documents),
        "num_bytes": len(streams[False]) + len(streams[True]),
        "sha256": whole.hexdigest(),
        "num_train_bytes": len(streams[False]),
        "num_heldout_bytes": len(streams[True]),
        "heldout_files": [d.name for d in documents if is_heldout(d.name)],
    }
    return Corpus(*(np.frombuffer(streams[part], np.uint8) for part in (False, True)), record)


def save_corpus(path: str | Path, corpus: Corpus) -> None:
    """Write a corpus to a KDTR file."""
    write_kdtr(path, {"train": corpus.train, "heldout": corpus.heldout}, {"corpus": corpus.record})


def load_corpus(path: str | Path | None = None) -> Corpus:
    """Read a corpus that `save_corpus` wrote; without a path, build that of the running interpreter."""
    if path is None:
        return build_corpus(read_documents())
    file = open_kdtr(path)
    return Corpus(file.array("train"), file.array("heldout"), file.metadata["corpus"])


def _is_generated(name: str) -> bool:
    return name.startswith(("_sysconfigdata", "config-"))


def is_utf8(text: bytes) -> bool:
    """Whether the bytes are well-formed UTF-8."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def main() -> None:
    """Command line: pack the corpus of the running interpreter."""
    parser = argparse.ArgumentParser(prog="python -m kdtree_nb.train.corpus", description=main.__doc__)
    parser.add_argument("--out", required=True, help="KDTR file to write")
    corpus = load_corpus()
    save_corpus(parser.parse_args().out, corpus)
    print({key: value for key, value in corpus.record.items() if key != "heldout_files"})


if __name__ == "__main__":
    main()
