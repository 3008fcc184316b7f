"""A checker that accepts a planted wrong answer is found out; an attempt gets its verdict."""

from __future__ import annotations

import pytest

from kdtree_nb import viz


def check_double(answer):
    assert answer(3) == 6, "3 doubled is 6"


def double(x):
    return 2 * x


def square(x):
    return x * x


def add_three(x):
    return x + 3


def test_rejected_wrong_answers_are_counted(capsys):
    viz.exercise.rejects(check_double, [square, lambda x: x])
    assert "check_double rejects 2 planted wrong answers" in capsys.readouterr().out


def test_an_accepted_wrong_answer_is_named():
    with pytest.raises(AssertionError, match="check_double accepts wrong answer 2: add_three"):
        viz.exercise.rejects(check_double, [square, add_three])


def test_a_broken_checker_is_no_rejection():
    with pytest.raises(NameError):
        viz.exercise.rejects(lambda answer: undefined(answer), [square])  # noqa: F821
    with pytest.raises(ValueError, match="at least one wrong answer"):
        viz.exercise.rejects(check_double, [])


def test_attempts(capsys):
    def todo(x):
        raise NotImplementedError

    viz.exercise.attempt(check_double, double)
    viz.exercise.attempt(check_double, square)
    viz.exercise.attempt(check_double, todo)
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["double: right", "square: not right yet. 3 doubled is 6", "todo: not tried yet"]
