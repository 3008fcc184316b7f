"""demo: side by side, what it counts, and that it notices a single wrong token or bit."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from kdtree_nb import Engine, cli, drafters
from kdtree_nb.commands import demo

FAST = ["demo", "--max-new-tokens", "48"]


@pytest.fixture
def spoil(monkeypatch):
    """spoil(change): generate_ddtree returns what `change` makes of its result."""
    original = Engine.generate_ddtree

    def plant(change):
        monkeypatch.setattr(Engine, "generate_ddtree", lambda *args, **kwargs: change(original(*args, **kwargs)))

    return plant


def flip_token(generation):
    return dataclasses.replace(generation, tokens=[*generation.tokens[:-1], generation.tokens[-1] ^ 1])


def flip_bit(generation):
    if generation.logits is None:
        return generation
    logits = generation.logits.clone()
    logits.view(-1).view(dtype=torch.int32)[-1] ^= 1
    return dataclasses.replace(generation, logits=logits)


def test_exact(capsys):
    assert cli.main(FAST) == 0
    out = capsys.readouterr().out
    assert "exact: 48 of 48 tokens equal, 12288 of 12288 logits equal to the bit" in out
    assert "\x1b" not in out  # no terminal, no colours
    forwards = next(line.split() for line in out.splitlines() if line.startswith("target forwards"))
    assert int(forwards[2]) == 48 > int(forwards[3]) and int(forwards[4]) == 48 - int(forwards[3])


@pytest.mark.parametrize(
    ("change", "message"), [(flip_token, "NOT EXACT: 47 of 48 tokens"), (flip_bit, "12287 of 12288 logits")]
)
def test_one_wrong_token_or_bit_is_status_1(capsys, spoil, change, message):
    spoil(change)
    assert cli.main(FAST) == 1
    assert message in capsys.readouterr().out


def test_json(capsys):
    assert cli.main([*FAST, "--json", "--dtype", "bfloat16"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"]["is_exact"] and found["ar"]["tokens"] == found["ddtree"]["tokens"]
    saved = found["ar"]["num_target_forwards"] - found["ddtree"]["num_target_forwards"]
    assert found["num_target_forwards_saved"] == saved > 0


@pytest.mark.parametrize("options", [["--drafter", "none"], ["--drafter", "random"], ["--model", "tiny2"]])
def test_other_drafters_and_models(options):
    assert cli.main([*FAST, "--prompt", "import os\n", *options]) == 0


def test_drafted_tokens_are_marked(models):
    model = models("tiny")
    prompt = model.tokenizer.encode(demo.named_prompt("properties"))
    run = Engine(model, drafter=drafters.NGram()).generate_ddtree(prompt, 48)
    pieces = demo.pieces(model, run)
    assert "".join(piece.text for piece in pieces) == model.tokenizer.decode(run.tokens)
    assert sum(piece.marked for piece in pieces) == sum(run.stats.accepted_per_step) > 0
    assert not any(piece.marked for piece in demo.pieces(model, Engine(model).generate_ar(prompt, 48)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", ""], "expected at least one character"),
        (["--prompt-name", "none"], "--prompt-name: expected one of read_config"),
        (["--max-new-tokens", "0"], "--max-new-tokens: expected at least 1, got 0"),
        (["--drafter", "none", "--budget", "8"], "--budget 8: expected a drafter, got --drafter none"),
    ],
)
def test_bad_input(capsys, options, message):
    assert cli.main(["demo", *options]) == 2
    assert message in capsys.readouterr().err


def test_a_prompt_has_one_source(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["demo", "--prompt", "x", "--prompt-name", "read_config"])
    assert stop.value.code == 2 and "not allowed with argument --prompt" in capsys.readouterr().err


def test_the_report_names_what_was_drafted(capsys):
    for options, named in (([], ("ngram", 16, "tree")), (["--drafter", "none"], ("none", 0, "tree"))):
        assert cli.main(["demo", "--max-new-tokens", "8", "--json", *options]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["drafter"], found["budget"], found["mode"]) == named
