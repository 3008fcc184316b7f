"""Checks of what a caller asks for. Each error says what was expected, what came and what to do."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from kdtree_nb.config import MAX_BUDGET


def check_prompts(prompt_ids: Any, vocab_size: int, max_seq_len: int) -> tuple[list[list[int]], bool]:
    """Fresh lists of ids, and whether a single prompt was given. Raises ValueError on an empty or unusable prompt."""
    prompt_ids = _as_list("generate", prompt_ids)
    if not prompt_ids:
        raise ValueError("generate: expected a prompt of at least 1 token (or a list of prompts), got an empty list")
    is_single = not _holds_prompts(prompt_ids)
    prompts = [prompt_ids] if is_single else [_as_list(f"generate: prompt {i}", p) for i, p in enumerate(prompt_ids)]
    checked = [_check_prompt(f"generate: prompt {i}", p, vocab_size, max_seq_len) for i, p in enumerate(prompts)]
    return checked, is_single


def check_prompt(prompt_ids: Any, vocab_size: int, max_seq_len: int) -> list[int]:
    """A fresh list of the ids of one prompt. Raises ValueError on an empty or unusable one, and on several."""
    prompt_ids = _as_list("submit", prompt_ids)
    if prompt_ids and _holds_prompts(prompt_ids):
        raise ValueError(
            f"submit: expected one list of token ids, got {len(prompt_ids)} items; submit prompts one by one"
        )
    return _check_prompt("submit", prompt_ids, vocab_size, max_seq_len)


def _holds_prompts(items: list[Any]) -> bool:
    return _is_sequence(items[0]) or isinstance(items[0], (str, bytes))


def _is_sequence(value: Any) -> bool:
    """Whether `value` holds several numbers; a tensor or array without dimensions is one number."""
    return hasattr(value, "__len__") and getattr(value, "ndim", 1) > 0 and not isinstance(value, (str, bytes))


def _as_list(where: str, ids: Any) -> list[Any]:
    if isinstance(ids, (str, bytes)):
        raise ValueError(f"{where}: expected token ids, got text; use model.tokenizer.encode(text)")
    try:
        return list(ids.tolist() if hasattr(ids, "tolist") else ids)
    except TypeError as error:
        raise ValueError(f"{where}: expected a list of token ids, got {ids!r}") from error


def _integers(where: str, ids: list[Any]) -> list[int]:
    try:
        if bool in map(type, ids):
            raise TypeError("a bool")
        return [operator.index(token) for token in ids]
    except TypeError as error:
        raise ValueError(f"{where}: expected integer token ids, got {error}") from error


def _check_prompt(where: str, prompt: list[Any], vocab_size: int, max_seq_len: int) -> list[int]:
    if not prompt:
        raise ValueError(f"{where}: expected at least 1 token, got none; begin with the token that separates documents")
    if len(prompt) >= max_seq_len:
        raise ValueError(
            f"{where}: expected at most {max_seq_len - 1} tokens, got {len(prompt)}: one more must fit into "
            f"max_seq_len {max_seq_len}; shorten the prompt or make the engine's max_seq_len larger"
        )
    ids = _integers(where, prompt)
    if min(ids) < 0 or max(ids) >= vocab_size:
        position = next(i for i, t in enumerate(ids) if not 0 <= t < vocab_size)
        raise ValueError(f"{where}: expected ids of 0 … {vocab_size - 1}, got {ids[position]} at position {position}")
    return ids


def check_counts(name: str, value: Any, num_streams: int, largest: int | None = None) -> list[int]:
    """One integer per stream, from 0 to `largest`. Raises ValueError otherwise."""
    values = _as_list(name, value) if _is_sequence(value) else [value] * num_streams
    if len(values) != num_streams:
        raise ValueError(f"{name}: expected one integer, or one for each of {num_streams} streams, got {len(values)}")
    bounds = "of at least 0" if largest is None else f"of 0 … {largest}"
    for v in values:
        is_integer = hasattr(v, "__index__") and not isinstance(v, bool)
        if not is_integer or v < 0 or (largest is not None and v > largest):
            raise ValueError(f"{name}: expected an integer {bounds}, got {v!r}")
    return [operator.index(v) for v in values]


def check_places(max_streams: int, max_waiting: int) -> tuple[int, int]:
    """How many submitted streams run, at least 1, and how many wait. Raises ValueError on anything else."""
    running, waiting = (
        check_counts(f"Engine: {name}", value, 1)[0]
        for name, value in (("max_streams", max_streams), ("max_waiting", max_waiting))
    )
    if running == 0:
        raise ValueError("Engine: max_streams: expected an integer of at least 1, got 0")
    return running, waiting


def check_stop_tokens(stop_token_ids: Any) -> frozenset[int]:
    """The ids that end a text. Raises ValueError on anything but integers."""
    return frozenset(_integers("stop_token_ids", _as_list("stop_token_ids", stop_token_ids)))


def check_budgets(where: str, budget: int | Sequence[int], num_streams: int) -> list[int]:
    """One budget per stream, 0 … 1023 (`MAX_BUDGET`). Raises ValueError otherwise."""
    return check_counts(f"{where}: budget", budget, num_streams, MAX_BUDGET)
