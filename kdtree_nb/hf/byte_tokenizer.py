"""A tokenizer.json whose tokens are the 256 bytes: what a model of bytes needs to be an ordinary checkpoint folder."""

from __future__ import annotations

import json
from typing import Any

_VISIBLE = frozenset((*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)))


def byte_characters() -> list[str]:
    """The character that a byte-level tokenizer.json writes for each byte: its own if visible, else one from 256 on."""
    others = iter(range(256, 512))
    return [chr(byte if byte in _VISIBLE else next(others)) for byte in range(256)]


def byte_tokenizer_json() -> str:
    """The file's text: token id = byte, no merges, nothing added around a text."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    fields: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {character: byte for byte, character in enumerate(byte_characters())}, "merges": [],
        },
    }  # fmt: skip
    return json.dumps(fields, ensure_ascii=False, indent=1) + "\n"
