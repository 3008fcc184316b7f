"""Prompts that no model was trained on: pieces of held-out files, read from what is installed when they are needed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kdtree_nb.model.checkpoint import DATA_DIR
from kdtree_nb.train.corpus import Document, read_documents
from kdtree_nb.train.nano.manifest import Manifest, pinned_documents
from kdtree_nb.train.nano.tokenizer import EOS
from kdtree_nb.train.nano.tokens import TokenCorpus

LENGTHS = (96, 288)
"""Shortest and longest prompt in tokens."""

BYTES_PER_TOKEN = 12
"""A prompt of n tokens is looked for in this many times n bytes: more than a token of text has."""

MAX_TRIES = 100
"""Places of a packed corpus that are looked at for each prompt, to find one inside a document."""

Encode = Callable[[str], list[int]]


@dataclasses.dataclass(frozen=True)
class PromptSet:
    """prompts: token ids; source: what they are pieces of, with versions and a hash of the text. JSON-ready."""

    prompts: list[list[int]]
    source: dict[str, Any]


def own_prompts(encode: Encode, kind: str | None = None) -> PromptSet:
    """This project's prompts (data/prompts.json) of one kind, or all."""
    path = DATA_DIR / "prompts.json"
    entries = json.loads(path.read_text(encoding="utf-8"))["prompts"]
    texts = [entry["text"] for entry in entries if kind in (None, entry["kind"])]
    if not texts:
        raise ValueError(f"own_prompts: expected a kind of {sorted({e['kind'] for e in entries})}, got {kind!r}")
    return PromptSet([encode(text) for text in texts], {"file": path.name, "sha256": _digest([path.read_bytes()])})


def library_prompts(encode: Encode, num_prompts: int, lengths: tuple[int, int] = LENGTHS, seed: int = 0) -> PromptSet:
    """Pieces of the standard library's files that were held out when tiny was trained, as this interpreter has them."""
    training = json.loads((DATA_DIR / "tiny_training.json").read_text(encoding="utf-8"))
    names = set(training["corpus"]["heldout_files"])
    documents = [document for document in read_documents() if document.name in names]
    source = {"standard library of CPython": platform.python_version(), "files": len(documents)}
    return _pieces(documents, encode, num_prompts, lengths, seed, source)


def pinned_prompts(
    manifest: Manifest, encode: Encode, kind: str, num_prompts: int, lengths: tuple[int, int] = LENGTHS, seed: int = 0
) -> PromptSet:
    """Pieces of the packages that nano-k2's corpus holds out: of their "code" or their "prose".

    Raises CorpusError where the installed packages are not those of the manifest.
    """
    documents = pinned_documents(manifest, kind, "heldout")
    packages = {p.name: p.version for p in manifest.packages if kind in p.parts and p.parts[kind].role == "heldout"}
    return _pieces(documents, encode, num_prompts, lengths, seed, {"kind": kind, "packages": packages})


def packed_prompts(
    corpus: TokenCorpus, kind: str, num_prompts: int, lengths: tuple[int, int] = LENGTHS, seed: int = 0
) -> PromptSet:
    """Pieces of the held-out "code" or "prose" of a packed corpus, where the packages themselves are not installed.

    Raises ValueError where there are not that many places.
    """
    stream, rng = corpus.streams[kind], np.random.default_rng(seed)
    prompts: list[list[int]] = []
    for _ in range(MAX_TRIES * num_prompts):
        num_tokens = int(rng.integers(lengths[0], lengths[1] + 1))
        start = int(rng.integers(max(1, len(stream) - num_tokens)))
        tokens = stream[start : start + num_tokens].tolist()
        if len(tokens) == num_tokens and EOS not in tokens and tokens not in prompts:
            prompts.append(tokens)
        if len(prompts) == num_prompts:
            source = {"kind": kind, "packed corpus": corpus.record["streams"][kind], "seed": seed}
            return PromptSet(prompts, source)
    raise ValueError(f"packed_prompts: expected {num_prompts} places in {len(stream)} tokens, found {len(prompts)}")


def _pieces(
    documents: Sequence[Document], encode: Encode, num_prompts: int, lengths: tuple[int, int], seed: int,
    source: dict[str, Any],
) -> PromptSet:  # fmt: skip
    """Prompts of random lengths that begin at random lines; a longer document is drawn more often.

    Raises ValueError for more prompts than there are lines, or than are found.
    """
    num_lines = sum(document.text.count(b"\n") + 1 for document in documents)
    if num_prompts > num_lines:
        raise ValueError(f"prompts: expected at most {num_lines}, the lines of the held-out files, got {num_prompts}")
    rng, found = np.random.default_rng(seed), set()
    sizes = np.array([len(document.text) for document in documents], dtype=np.float64)
    prompts: list[list[int]] = []
    for _ in range(MAX_TRIES * num_prompts):
        document = documents[rng.choice(len(documents), p=sizes / sizes.sum())]
        num_tokens = int(rng.integers(lengths[0], lengths[1] + 1))
        start = document.text.rfind(b"\n", 0, int(rng.integers(len(document.text)))) + 1
        text = document.text[start : start + BYTES_PER_TOKEN * num_tokens].decode(errors="ignore")
        tokens = encode(text)[:num_tokens]
        if len(tokens) == num_tokens and tuple(tokens) not in found:
            found.add(tuple(tokens))
            prompts.append(tokens)
        if len(prompts) == num_prompts:
            digest = _digest([document.text for document in documents])
            return PromptSet(prompts, {**source, "sha256": digest, "seed": seed})
    raise ValueError(f"prompts: expected {num_prompts} places in {len(documents)} held-out files, found {len(prompts)}")


def _digest(texts: Sequence[bytes]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()
