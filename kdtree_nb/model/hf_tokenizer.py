"""Tokenizers of checkpoint folders: tokenizer.json through `tokenizers`, Kimi's tiktoken ranks through `tiktoken`."""

from __future__ import annotations

import base64
import importlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, Protocol

from kdtree_nb.errors import CheckpointError
from kdtree_nb.hf.json_file import read_object
from kdtree_nb.model.tokenizer import StreamDecoder

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

NUM_RESERVED_TOKENS = 256
"""Special tokens behind the ranks of a Kimi tokenizer; those without a name are <|reserved_token_ID|>."""

_LETTERS = r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_LETTERS}*[\p{{Ll}}{_LETTERS}+{_ENDING}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_LETTERS}+[\p{{Ll}}{_LETTERS}*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""How Kimi's tokenizer cuts text before it merges bytes: runs of Han, words with their ending, numbers of up to three
digits, punctuation, line ends, blanks. A fact about the model family: another pattern gives other tokens."""


class Stream(Protocol):
    """Decodes ids as they arrive and holds an unfinished character back until it is complete."""

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes, perhaps empty."""

    def finish(self) -> str:
        """The text of what is still held back; a second time none."""


class Tokenizer(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str) -> list[int]:
        """Ids of `text`."""

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of `token_ids`."""

    def stream(self) -> Stream:
        """A decoder of ids that arrive one by one."""


def find_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a checkpoint folder. Without one, a stand-in that says so when it is used."""
    settings = _read_json(folder / "tokenizer_config.json")
    template = _template(folder, settings)
    if (folder / "tokenizer.json").is_file():
        return JsonTokenizer(folder / "tokenizer.json", template, settings)
    if (folder / "tiktoken.model").is_file():
        return TiktokenTokenizer(folder / "tiktoken.model", template, settings)
    return NoTokenizer(folder)


def _read_json(path: Path) -> dict[str, Any]:
    return read_object(path, "tokenizer") if path.exists() else {}


def _template(folder: Path, settings: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    try:
        value = path.read_text(encoding="utf-8") if path.is_file() else settings.get("chat_template")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"tokenizer: {path}: expected a readable template in UTF-8, got {error}") from error
    if isinstance(value, list):  # several by name
        value = next((v.get("template") for v in value if isinstance(v, dict) and v.get("name") == "default"), None)
    return value if isinstance(value, str) else None


def _library(name: str, path: Path) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CheckpointError(
            f"tokenizer: {path}: expected the package {name!r} to read it, got none; pip install 'kdtree_nb[hf]'"
        ) from error


class _Chat:
    """What both kinds share: the chat template of the folder."""

    def __init__(self, path: Path, template: str | None, settings: dict[str, Any]) -> None:
        self.path, self.template = path, template
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        self._special = {name: _content(settings[name]) for name in names if settings.get(name) is not None}

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], **variables: Any) -> list[int]:
        """Ids of a conversation, [{"role": …, "content": …}, …], and the beginning of the answer.

        The template is rendered by `transformers`, whose rules are those that templates are written for. Raises
        CheckpointError where the folder has no template.
        """
        if self.template is None:
            raise CheckpointError(f"chat: {self.path.parent}: expected a chat template, got none; give plain text")
        render = _library("transformers.utils.chat_template_utils", self.path).render_jinja_template
        try:
            rendered = render([list(messages)], chat_template=self.template, add_generation_prompt=True,
                              **{**self._special, **variables})  # fmt: skip
        except Exception as error:  # a template is a program: it may refuse the messages or fail in any way
            raise CheckpointError(
                f"chat: {self.path.parent}: expected a chat template that renders these messages, got "
                f"{type(error).__name__}: {error}; give plain text"
            ) from error
        text = rendered[0][0] if isinstance(rendered, tuple) else rendered[0]
        return self.encode(text)

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


class JsonTokenizer(_Chat):
    """A tokenizer.json. Special tokens are recognised in text and, in `decode`, kept."""

    def __init__(self, path: Path, template: str | None = None, settings: dict[str, Any] | None = None) -> None:
        super().__init__(path, template, settings or {})
        library = _library("tokenizers", path)
        self._new_stream = library.decoders.DecodeStream
        try:
            self._tokenizer = library.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise CheckpointError(f"tokenizer: {path}: expected a tokenizer.json, got {error}") from error

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, with what the file adds around it (such as a first token)."""
        text.encode()  # a lone surrogate is the caller's error, not the library's
        return self._tokenizer.encode(text).ids

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of `token_ids`; ids without a token have none."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def stream(self) -> Stream:
        """A decoder of ids that arrive one by one."""
        return _JsonStream(self._tokenizer, self._new_stream(skip_special_tokens=False))


class _JsonStream:
    def __init__(self, tokenizer: Any, stream: Any) -> None:
        self._tokenizer, self._stream = tokenizer, stream
        self._held: list[int] = []  # ids since the last text: perhaps bytes of a character that is not complete

    def push(self, token_id: int) -> str:
        text = self._stream.step(self._tokenizer, token_id)
        self._held = [*self._held, token_id] if text is None else []
        return text or ""

    def finish(self) -> str:
        held, self._held = self._held, []
        return self._tokenizer.decode(held, skip_special_tokens=False)


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Lines of base64 bytes and their rank. tiktoken's own reader would keep a copy by path and miss a changed file."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            token, rank = line.split()
            value = base64.b64decode(token, validate=True)
            if value in ranks:
                raise CheckpointError(
                    f"tokenizer: {path}: line {number}: expected each token once, got {value!r} again"
                )
            ranks[value] = int(rank)
        except ValueError as error:
            where = f"tokenizer: {path}: line {number}"
            raise CheckpointError(f"{where}: expected base64 and a rank, got {line!r:.80}") from error
    if sorted(ranks.values()) != list(range(len(ranks))) or not ranks:
        raise CheckpointError(f"tokenizer: {path}: expected ranks 0, 1, … each once, got {len(ranks)} others")
    lacking = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if lacking:
        raise CheckpointError(f"tokenizer: {path}: expected a rank for every single byte, got none for {lacking}")
    return ranks


def _special_tokens(fields: Any, first: int, path: Path) -> dict[str, int]:
    """Names of the NUM_RESERVED_TOKENS ids from `first` on, where tokenizer_config.json's added_tokens_decoder gives
    any."""
    named = {} if fields is None else fields
    ids = range(first, first + NUM_RESERVED_TOKENS)
    is_object = isinstance(named, dict)
    names = [_content(named.get(str(i), f"<|reserved_token_{i}|>")) for i in ids] if is_object else []
    if not is_object or not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
        raise CheckpointError(
            f"tokenizer: {path}: added_tokens_decoder: expected an object of ids to tokens with a content each, no two "
            f"the same, got {fields!r:.200}"
        )
    return dict(zip(names, ids, strict=True))


class TiktokenTokenizer(_Chat):
    """Kimi's tokenizer: byte pairs by rank in `tiktoken.model`, then 256 special tokens."""

    def __init__(self, path: Path, template: str | None = None, settings: dict[str, Any] | None = None) -> None:
        super().__init__(path, template, settings or {})
        library, ranks = _library("tiktoken", path), _read_ranks(path)
        fields = (settings or {}).get("added_tokens_decoder")
        special = _special_tokens(fields, len(ranks), path.parent / "tokenizer_config.json")
        self._encoding = library.Encoding(
            path.parent.name, pat_str=KIMI_PATTERN, mergeable_ranks=ranks, special_tokens=special
        )

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; names of special tokens in it become those tokens."""
        text.encode()
        return self._encoding.encode(text, allowed_special="all")

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of `token_ids`; bytes that are not valid UTF-8, and ids without a token, become U+FFFD."""
        stream = self.stream()
        return "".join([stream.push(i) for i in token_ids]) + stream.finish()

    def stream(self) -> Stream:
        """A decoder of ids that arrive one by one."""
        return _TiktokenStream(self._encoding)


class _TiktokenStream:
    def __init__(self, encoding: Any) -> None:
        self._encoding, self._bytes = encoding, StreamDecoder()

    def push(self, token_id: int) -> str:
        try:
            value = self._encoding.decode_single_token_bytes(token_id)
        except (KeyError, OverflowError):
            return self._bytes.finish() + _REPLACEMENT
        return "".join([self._bytes.push(byte) for byte in value])

    def finish(self) -> str:
        return self._bytes.finish()


class NoTokenizer:
    """Stands where a folder has no tokenizer: token ids work, text does not."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _refuse(self) -> NoReturn:
        raise CheckpointError(
            f"tokenizer: {self._folder}: expected tokenizer.json or tiktoken.model, got neither; give token ids, or "
            "put the tokenizer's files into the folder"
        )

    def encode(self, text: str) -> list[int]:
        """Raises CheckpointError."""
        self._refuse()

    def decode(self, token_ids: Iterable[int]) -> str:
        """Raises CheckpointError."""
        self._refuse()

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], **variables: Any) -> list[int]:
        """Raises CheckpointError."""
        self._refuse()

    def stream(self) -> Stream:
        """Raises CheckpointError."""
        self._refuse()
