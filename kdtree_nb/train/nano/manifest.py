"""The manifest pins the corpus: for every package its version, licence, what it is for, and the hash of its text.

The text itself is never stored: it is read from the packages of the running environment and compared with the manifest.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

from kdtree_nb.errors import CorpusError
from kdtree_nb.kdtr import write_atomically
from kdtree_nb.train.corpus import Document
from kdtree_nb.train.nano import documents as reading
from kdtree_nb.train.nano.documents import KINDS, PYTHON

FORMAT = 1
ROLES = ("train", "heldout")

HELDOUT_PACKAGES = frozenset({"click", "jsonschema", "lark", "networkx", "prompt-toolkit", "tornado"})
"""Whole packages on which nothing is ever trained: graphs, networking, parsing, schemas and two kinds of terminals."""

REMEDY = "install what constraints.txt pins (make env), or train from a packed corpus (--corpus FILE)"


@dataclasses.dataclass(frozen=True)
class Part:
    """The documents of one kind in one package. sha256 is over their names and texts, in order of name."""

    role: str
    num_files: int
    num_bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Package:
    """One package and its parts by kind, those without documents left out."""

    name: str
    version: str
    licence: str
    parts: dict[str, Part]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """All packages of a corpus, in order of name."""

    packages: tuple[Package, ...]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON text."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """JSON text with one line per package, so that a change shows in a diff."""
        lines = ",\n".join("  " + json.dumps(dataclasses.asdict(package)) for package in self.packages)
        return f'{{"format": {FORMAT}, "packages": [\n{lines}\n]}}\n'

    def totals(self) -> dict[str, dict[str, int]]:
        """Bytes by kind and role."""
        sums = {kind: dict.fromkeys(ROLES, 0) for kind in KINDS}
        for package in self.packages:
            for kind, part in package.parts.items():
                sums[kind][part.role] += part.num_bytes
        return sums


def role_of(name: str, kind: str) -> str:
    """What a package's documents of a kind are for. Of the other packages' prose, a third is held out, by name."""
    if name in HELDOUT_PACKAGES:
        return "heldout"
    return "heldout" if kind == "prose" and hashlib.sha256(name.encode()).digest()[0] % 3 == 0 else "train"


def make_manifest() -> Manifest:
    """That of the running environment: the standard library and the packages whose licence is known and not the GPL."""
    packages = [_describe(PYTHON, reading.python_version(), "PSF-2.0", reading.read_python)]
    for name, distribution in reading.installed().items():
        licence = reading.licence_of(distribution)
        if reading.is_usable(licence):
            packages.append(_describe(name, distribution.version, licence, _reader(distribution)))
    return Manifest(tuple(sorted((p for p in packages if p.parts), key=lambda p: p.name)))


def read_manifest(path: Path) -> Manifest:
    """Raises CorpusError, naming the file, when it is no manifest."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        if fields["format"] != FORMAT:
            raise ValueError(f"format {fields['format']!r}, expected {FORMAT}")
        return Manifest(tuple(_parse(package) for package in fields["packages"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorpusError(f"corpus: {path}: expected a manifest that this package wrote, got {error!r}") from error


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write it for `read_manifest`."""
    write_atomically(path, [manifest.to_json().encode()])


def pinned_documents(manifest: Manifest, kind: str, role: str) -> list[Document]:
    """The manifest's documents of a kind ("code", "prose") and role ("train", "heldout"), read from this environment.

    Names begin with the package's. A document whose text an earlier one has is left out; so is, from training, one
    that is held out elsewhere. Raises CorpusError that names every package that differs and how.
    """
    found, differences = _read_parts(manifest, kind, role)
    if differences:
        raise CorpusError(
            f"corpus: expected the packages of the manifest, got {len(differences)} that differ: "
            f"{'; '.join(differences)}. To repair: {REMEDY}"
        )
    seen = {hashlib.sha256(d.text).digest() for d in _heldout(manifest)} if role == "train" else set()
    return _without_repeats(found, seen)


def _read_parts(manifest: Manifest, kind: str, role: str) -> tuple[list[Document], list[str]]:
    here, found, differences = reading.installed(), [], []
    for package in manifest.packages:
        part = package.parts.get(kind)
        if part is None or part.role != role:
            continue
        version, documents = _read_package(here, package.name, kind)
        if version != package.version:
            differences.append(f"{package.name}: expected version {package.version}, got {version or 'none'}")
        elif reading.digest(documents) != part.sha256:
            size = sum(len(d.text) for d in documents)
            differences.append(
                f"{package.name} {version}: expected {part.num_files} {kind} files, {part.num_bytes} bytes, hash "
                f"{part.sha256[:12]}, got {len(documents)} files, {size} bytes, hash {reading.digest(documents)[:12]}"
            )
        found += [Document(f"{package.name}/{d.name}", d.text) for d in documents]
    return found, differences


def _read_package(here: dict[str, Distribution], name: str, kind: str) -> tuple[str, list[Document]]:
    """(version, documents) in this environment; no version when it is not installed."""
    if name == PYTHON:
        return reading.python_version(), reading.read_python(kind)
    return (here[name].version, reading.read_distribution(here[name], kind)) if name in here else ("", [])


def _heldout(manifest: Manifest) -> list[Document]:
    """Held-out documents of both kinds, as far as this environment has them."""
    return [document for kind in KINDS for document in _read_parts(manifest, kind, "heldout")[0]]


def _without_repeats(documents: Iterable[Document], seen: set[bytes]) -> list[Document]:
    kept, seen = [], set(seen)
    for document in documents:
        key = hashlib.sha256(document.text).digest()
        if key not in seen:
            seen.add(key)
            kept.append(document)
    return kept


def _describe(name: str, version: str, licence: str, read: Callable[[str], list[Document]]) -> Package:
    parts = {}
    for kind in KINDS:
        documents = read(kind)
        if documents:
            size = sum(len(d.text) for d in documents)
            parts[kind] = Part(role_of(name, kind), len(documents), size, reading.digest(documents))
    return Package(name, version, licence, parts)


def _reader(distribution: Distribution) -> Callable[[str], list[Document]]:
    return lambda kind: reading.read_distribution(distribution, kind)


def _parse(fields: dict[str, Any]) -> Package:
    parts = {kind: Part(**part) for kind, part in fields["parts"].items()}
    unknown = sorted({part.role for part in parts.values()} - set(ROLES)) + sorted(set(parts) - set(KINDS))
    if unknown:
        raise ValueError(f"{fields['name']}: unknown roles or kinds {unknown}")
    return Package(fields["name"], fields["version"], fields["licence"], parts)
