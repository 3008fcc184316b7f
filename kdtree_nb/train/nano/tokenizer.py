"""The tokenizer of nano-k2: byte-level BPE with 4,096 entries, trained on the corpus. Same text, same file."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from kdtree_nb.errors import CorpusError
from kdtree_nb.kdtr import write_atomically
from kdtree_nb.model.checkpoint import DATA_DIR
from kdtree_nb.train.corpus import Document

TOKENIZER_PATH = DATA_DIR / "nano-k2" / "tokenizer.json"
VOCAB_SIZE = 4096
EOS, MASK = 0, 1
"""Ids of the token behind every document, and of the one that stands where a drafter has yet to fill in."""

SPECIAL_TOKENS = ("<|eos|>", "<|mask|>")
MAX_TRAINING_BYTES = 40_000_000
_BATCH = 512


def train_bpe(documents: Sequence[Document], vocab_size: int = VOCAB_SIZE, max_bytes: int = MAX_TRAINING_BYTES) -> str:
    """The text of tokenizer.json, learnt from documents of at most max_bytes, in the order of their names' hashes.
    Raises ValueError where they are too few for vocab_size entries."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(documents, max_bytes), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"train_bpe: expected text enough for {vocab_size} entries, got {tokenizer.get_vocab_size()}; give more "
            "documents or a smaller vocabulary"
        )
    return tokenizer.to_str()


def save_tokenizer(path: Path, text: str) -> None:
    """Write tokenizer.json."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, [text.encode()])


def load_tokenizer(path: Path) -> Any:
    """The `tokenizers.Tokenizer` of a tokenizer.json. Raises CorpusError where there is none."""
    if not path.is_file():
        raise CorpusError(
            f"tokenizer: expected a tokenizer.json, found nothing at {path}; make it: kdtree-nb train-nano tokenizer"
        )
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # its own type
        raise CorpusError(f"tokenizer: {path}: expected a tokenizer.json, got {error}; make it anew") from error


def fingerprint(path: Path) -> str:
    """SHA-256 of the file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def encode(tokenizer: Any, documents: Sequence[Document], what: str = "encode") -> np.ndarray:
    """All documents' ids, int16 [n], each followed by EOS; a special token's name in a text is text like any other.

    ValueError when the vocabulary has no place in int16.
    """
    if tokenizer.get_vocab_size() > np.iinfo(np.int16).max:
        raise ValueError(f"encode: expected at most {np.iinfo(np.int16).max} entries, got {tokenizer.get_vocab_size()}")
    tokenizer.encode_special_tokens = True
    pieces = []
    for start in tqdm(range(0, len(documents), _BATCH), desc=what, unit="batch", mininterval=1.0, leave=False):
        texts = [document.text.decode() for document in documents[start : start + _BATCH]]
        pieces += [np.array([*e.ids, EOS], np.int16) for e in tokenizer.encode_batch_fast(texts)]
    return np.concatenate(pieces) if pieces else np.zeros(0, np.int16)


def _sample(documents: Sequence[Document], max_bytes: int) -> list[str]:
    texts, size = [], 0
    for document in sorted(documents, key=lambda d: hashlib.sha256(d.name.encode()).digest()):
        size += len(document.text)
        if size > max_bytes:
            break
        texts.append(document.text.decode())
    return texts
