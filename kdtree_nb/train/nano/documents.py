"""The text of installed packages: source files and documentation of a distribution, filtered, in order of name."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import platform
import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from kdtree_nb.train.corpus import EXCLUDED_FOLDERS, MAX_BYTES, SEPARATOR, Document, is_utf8, read_documents

KINDS = ("code", "prose")
"""Python files; Markdown and reStructuredText, and the description in a distribution's metadata."""

PYTHON = "python"
"""Name under which the interpreter's standard library is listed beside the distributions."""

NOT_READ = frozenset({"kdtree-nb", "pip", "setuptools", "wheel"})
"""This project itself, and what differs between environments made from one lock file."""

MAX_MEAN_LINE_BYTES = 90
"""Python files with longer lines on average are tables of data."""

MAX_PACKAGE_BYTES = 32 << 20
"""Of a larger package, files are taken in the order of their names' hashes until it is reached."""

MIN_DOCUMENT_BYTES = 400
MAX_LICENCE_LENGTH = 200

_PROSE = (".md", ".rst")


def installed() -> dict[str, importlib.metadata.Distribution]:
    """The distributions of this environment by normalised name, in order of name."""
    found = {normalise(d.metadata["Name"]): d for d in importlib.metadata.distributions() if d.metadata["Name"]}
    return dict(sorted((name, d) for name, d in found.items() if name not in NOT_READ))


def normalise(name: str) -> str:
    """A distribution's name as registries compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def licence_of(distribution: importlib.metadata.Distribution) -> str:
    """What the metadata says: an expression, else the classifiers, else the licence field's first line, or ""."""
    metadata = distribution.metadata
    classes = [c.split(" :: ")[-1] for c in metadata.get_all("Classifier") or [] if c.startswith("License :: ")]
    lines = (metadata.get("License") or "").strip().splitlines()
    stated = metadata.get("License-Expression") or " AND ".join(classes) or (lines[0] if lines else "")
    return stated.strip()[:MAX_LICENCE_LENGTH]


def is_usable(licence: str) -> bool:
    """Whether a model may be trained on it here: a licence is stated and it is not the GPL."""
    return bool(licence) and "GPL" not in licence and "General Public" not in licence


def read_python(kind: str) -> list[Document]:
    """Of the running interpreter: source files of its standard library, or its reference pages (`pydoc_data`)."""
    found = read_documents() if kind == "code" else _reference_pages()
    return [document for document in found if _is_kept(document.name, document.text)]


def _reference_pages() -> list[Document]:
    topics = importlib.import_module("pydoc_data.topics").topics
    return [Document(f"topics/{name}.rst", text.encode()) for name, text in sorted(topics.items())]


def python_version() -> str:
    """Implementation and version of the running interpreter."""
    return f"{platform.python_implementation()} {platform.python_version()}"


def read_distribution(distribution: importlib.metadata.Distribution, kind: str) -> list[Document]:
    """The documents of one kind ("code" or "prose") that the distribution's own list of files names."""
    documents = []
    for file in sorted(distribution.files or [], key=str):
        name = PurePosixPath(file).as_posix()
        if not _is_of_kind(name, kind) or EXCLUDED_FOLDERS.intersection(name.split("/")) or name.startswith(".."):
            continue
        path = distribution.locate_file(file)
        text = path.read_bytes().replace(b"\r\n", b"\n") if path.is_file() else b""
        text = _description(text) if name.endswith("METADATA") else text
        if _is_kept(name, text):
            documents.append(Document(name, text))
    return _at_most(MAX_PACKAGE_BYTES, documents)


def digest(documents: Iterable[Document]) -> str:
    """SHA-256 over names and texts."""
    whole = hashlib.sha256()
    for document in documents:
        for part in (document.name.encode(), document.text):
            whole.update(len(part).to_bytes(8, "little") + part)
    return whole.hexdigest()


def _at_most(num_bytes: int, documents: list[Document]) -> list[Document]:
    """Some of the documents, in their order, of no more than num_bytes together."""
    taken, size = set(), 0
    for document in sorted(documents, key=lambda d: hashlib.sha256(d.name.encode()).digest()):
        size += len(document.text)
        if size > num_bytes:
            break
        taken.add(document.name)
    return [document for document in documents if document.name in taken]


def _is_of_kind(name: str, kind: str) -> bool:
    if kind == "code":
        return name.endswith(".py")
    return name.endswith(_PROSE) or (name.endswith(".dist-info/METADATA"))


def _description(metadata: bytes) -> bytes:
    """The text behind the header of a METADATA file."""
    return metadata.partition(b"\n\n")[2]


def _is_kept(name: str, text: bytes) -> bool:
    if not MIN_DOCUMENT_BYTES <= len(text) <= MAX_BYTES or SEPARATOR in text or not is_utf8(text):
        return False
    return not name.endswith(".py") or len(text) / (text.count(b"\n") + 1) <= MAX_MEAN_LINE_BYTES
