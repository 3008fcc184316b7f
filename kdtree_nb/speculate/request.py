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
    is_single = not (_is_sequence(prompt_ids[0]) or isinstance(prompt_ids[0], (str, bytes)))
    prompts = [prompt_ids] if is_single else [_as_list(f"generate: prompt {i}", p) for i, p in enumerate(prompt_ids)]
    return [_check_prompt(i, p, vocab_size, max_seq_len) for i, p in enumerate(prompts)], is_single


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


def _check_prompt(index: int, prompt: list[Any], vocab_size: int, max_seq_len: int) -> list[int]:
    where = f"generate: prompt {index}"
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


def check_stop_tokens(stop_token_ids: Any) -> frozenset[int]:
    """The ids that end a text. Raises ValueError on anything but integers."""
    return frozenset(_integers("stop_token_ids", _as_list("stop_token_ids", stop_token_ids)))


def check_budgets(where: str, budget: int | Sequence[int], num_streams: int) -> list[int]:
    """One budget per stream, 0 … 1023 (`MAX_BUDGET`). Raises ValueError otherwise."""
    return check_counts(f"{where}: budget", budget, num_streams, MAX_BUDGET)
