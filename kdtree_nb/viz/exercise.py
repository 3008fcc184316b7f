"""Exercises: a checker is a function of the reader's answer that raises AssertionError when the answer is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Checker = Callable[[Any], object]


def rejects(checker: Checker, wrong_answers: Sequence[Any]) -> None:
    """Show that `checker` rejects each planted wrong answer, and say so. Raises AssertionError naming one that passes.

    Only an AssertionError counts as a rejection: any other exception is a fault of the checker and comes through.
    """
    if not wrong_answers:
        raise ValueError("exercise.rejects: expected at least one wrong answer, got none")
    for number, wrong in enumerate(wrong_answers, start=1):
        try:
            checker(wrong)
        except AssertionError:
            continue
        raise AssertionError(f"{_name(checker)} accepts wrong answer {number}: {_name(wrong)}")
    print(f"{_name(checker)} rejects {len(wrong_answers)} planted wrong answers")


def attempt(checker: Checker, answer: Any) -> None:
    """Check the reader's answer and print the verdict: right, not right yet, or not tried yet (NotImplementedError)."""
    try:
        checker(answer)
    except NotImplementedError:
        verdict = "not tried yet"
    except AssertionError as error:
        verdict = f"not right yet. {str(error).partition(chr(10))[0]}"
    else:
        verdict = "right"
    print(f"{_name(answer)}: {verdict}")


def _name(thing: Any) -> str:
    return getattr(thing, "__name__", repr(thing))
