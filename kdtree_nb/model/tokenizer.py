"""Byte tokenizer: a token id below 256 is a byte of UTF-8 text."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class ByteTokenizer:
    """Text to UTF-8 bytes and back. Ids of 256 and above have no text and decode to U+FFFD."""

    def encode(self, text: str) -> list[int]:
        """The UTF-8 bytes of `text` as ids below 256. Raises UnicodeEncodeError on lone surrogates."""
        return list(text.encode("utf-8"))

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of `token_ids`; bytes that are not valid UTF-8 become U+FFFD, so that it never fails."""
        decoder = self.stream()
        return "".join([decoder.push(t) for t in token_ids]) + decoder.finish()

    def stream(self) -> StreamDecoder:
        """A decoder of ids that arrive one by one."""
        return StreamDecoder()


class StreamDecoder:
    """Decodes a stream of ids as they arrive and holds an unfinished character back until it is complete."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes, perhaps empty. Raises ValueError on a negative id."""
        if token_id < 0:
            raise ValueError(f"decode: expected token ids of at least 0, got {token_id}")
        if token_id > 255:
            return self.finish() + _REPLACEMENT
        return self._utf8.decode(bytes((token_id,)))

    def finish(self) -> str:
        """The text of what is still held back: U+FFFD for a character cut short, else nothing."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest
