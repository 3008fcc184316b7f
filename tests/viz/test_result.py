"""The cover picture: text that was really generated, and the headlines that records hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kdtree_nb.viz import Record, Result
from kdtree_nb.viz.result import NUM_TOKENS, PROMPT, PROMPTS, draw_result, headline_bars

SECONDS = {
    "ngram_ddtree/AR": ({}, 4.0),
    "ngram_ddtree/DDTree": ({}, 2.0),
    "ar_step/numpy": ({"threads": 2}, 6.0),
    "ar_step/native": ({"threads": 1}, 2.0),
}
RESULTS = tuple(Result(name, "s", (seconds,), params) for name, (params, seconds) in SECONDS.items())
RECORD = Record("box", "2026-12-01", "abc", {"torch": "2.13.0"}, "kdtree-nb bench", RESULTS, Path("a.json"))


def test_bars_compare_equal_params_only():
    assert headline_bars([RECORD]) == [("draft trees / AR decoding\nbox", 2.0)]


@pytest.mark.parametrize("records", [[], [RECORD]])
def test_the_picture_shows_the_prompt_and_every_token(records):
    fig = draw_result(records)
    text, *bars = fig.axes if not fig.subfigs else [ax for part in fig.subfigs for ax in part.axes]
    assert len(text.patches) == NUM_TOKENS
    prompt = next(p["text"] for p in json.loads(PROMPTS.read_text())["prompts"] if p["name"] == PROMPT)
    drawn = "".join(t.get_text() for t in text.texts)
    assert drawn.startswith("".join(prompt.split()))
    assert len(bars) == len(records)
